"""Distributed optimizers of Keras 3."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from dataclasses import dataclass
from typing import Any

from ronde.errors import UsageError
from ronde.keras.backends import BACKEND, front_end, keras
from ronde.keras.distributed import LEGACY_CURE, CallableList, ReductionOptions
from ronde.keras.gradients import GradientReduction

_KERAS_2_NAMES = ("lr", "get_gradients", "compute_gradients", "_compute_gradients")
_KEPT = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""Settings of an optimizer that its config lacks."""


_Keras: Any = object  # the mixins are put before a class of Keras


@dataclass(frozen=True, slots=True)
class _Variables:
    """Variables by key, in an object that Keras does not search for variables."""

    by_key: dict[Any, Any]


class _ReducingOptimizer(_Keras):
    """Base of the distributed classes, put before the class of the user's optimizer."""

    # Class attributes, so that ``from_config`` gives a distributed optimizer too.
    _reduction: GradientReduction
    _local = _Variables({})

    @property
    def variables(self) -> CallableList:
        return CallableList(super().variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        gradients = self._reduced(gradients, trainable_variables)
        super().apply(gradients, trainable_variables)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        key = self._var_key(var)
        self._local = _Variables({**self._local.by_key, key: var})

    def _is_local(self, variable: Any) -> bool:
        by_key = self._local.by_key
        return bool(by_key) and self._var_key(variable) in by_key

    def __getattr__(self, name: str) -> Any:
        if name in _KERAS_2_NAMES:
            raise AttributeError(
                f"an optimizer of Keras 3 has no {name}. {LEGACY_CURE}", name=name
            )
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)

    def _reduced(self, gradients: Any, variables: Any) -> list[Any]:
        """Return the gradients, reduced unless their accumulated sum will be."""
        if self._is_accumulating:
            return gradients
        variables = self._trainable_variables if variables is None else variables
        return self._reduction.reduce(gradients, variables, self._is_local)


class _ReducingApply(_ReducingOptimizer):
    """Reduces gradients before clipping, weight decay and the update."""

    _updated = _Variables({})  # by their index in the update in progress

    @property
    def _is_accumulating(self) -> bool:
        return bool(self.gradient_accumulation_steps)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        variables: list[Any] = list(trainable_variables)
        self._updated = _Variables(dict(enumerate(variables)))
        super()._backend_apply_gradients(grads, variables)

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras calls this with the mean of the accumulated gradients; on JAX in every
        # step, as it computes both branches.
        if self._is_accumulating:
            variables, gradients = list(self._updated.by_key.values()), grads

            def reduced() -> list[Any]:
                return self._reduction.reduce(gradients, variables, self._is_local)

            if BACKEND == "jax":
                is_update = (
                    self._iterations + 1
                ) % self.gradient_accumulation_steps == 0
                grads = keras.ops.cond(is_update, reduced, lambda: gradients)
            else:
                grads = reduced()
        return super()._clip_gradients(grads)


class _ReducingLossScale(_ReducingOptimizer):
    """Reduces scaled gradients before the check for infinities.

    So all ranks skip the same steps. If the inner optimizer accumulates gradients, it
    reduces their sum, and the ranks agree on the result of the check in every step.
    """

    def __init__(self, inner_optimizer: Any, *args: Any, **options: Any) -> None:
        if inner_optimizer.gradient_accumulation_steps:
            inner_optimizer = _distributed(inner_optimizer, self._reduction)
        super().__init__(inner_optimizer, *args, **options)

    @property
    def _is_accumulating(self) -> bool:
        return bool(self.inner_optimizer.gradient_accumulation_steps)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        return super().stateless_apply(
            optimizer_variables, self._reduced(grads, None), trainable_variables
        )

    def check_finite(self, grads: Any) -> Any:
        finite = super().check_finite(grads)
        if not self._is_accumulating:
            return finite
        return self._reduction.least(keras.ops.cast(finite, "float32")) > 0.5

    def register_local_var(self, var: Any) -> None:
        super().register_local_var(var)
        if self._is_accumulating:
            self.inner_optimizer.register_local_var(var)


def distribute(optimizer: Any, name: str | None, options: ReductionOptions) -> Any:
    """Return a distributed copy of an optimizer of Keras 3, with its state.

    With the policy ``mixed_float16`` the copy scales the loss, so that ``compile``
    leaves it as it is.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"optimizer must be an optimizer of Keras 3, got {optimizer!r}. "
            f"{LEGACY_CURE}"
        )
    if isinstance(optimizer, _ReducingOptimizer):
        raise UsageError("optimizer must not be distributed already.")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    passes = options.backward_passes_per_step
    if passes > 1 and (inner.built or inner.gradient_accumulation_steps):
        raise UsageError(
            "backward_passes_per_step must be 1 for an optimizer that is built or has "
            f"gradient_accumulation_steps, got {passes}."
        )
    scope = name or f"Distributed{type(inner).__name__}"
    # Keras divides the accumulated sum by the number of passes.
    factor = 1 if options.average_aggregated_gradients else passes
    to_tensor = keras.ops.convert_to_tensor
    reduction = GradientReduction(scope, options, front_end, to_tensor, factor)
    plain = _copy(inner, type(inner), passes)
    base = keras.optimizers.LossScaleOptimizer
    config: dict[str, Any] = {"name": "loss_scale_optimizer"}
    if inner is not optimizer:
        config = optimizer.get_config()
        del config["inner_optimizer"]
    elif keras.config.dtype_policy().name != "mixed_float16":
        return _with_state(optimizer, _distributed(plain, reduction))
    copy = _reducing(_ReducingLossScale, base, reduction)(plain, **config)
    return _with_state(optimizer, copy)


def _distributed(optimizer: Any, reduction: GradientReduction) -> Any:
    return _copy(optimizer, _reducing(_ReducingApply, type(optimizer), reduction))


def _reducing(first: Any, base: Any, reduction: GradientReduction) -> Any:
    """Return a class; Keras saves its objects as those of ``base``."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (first, base), {**names, "_reduction": reduction})


def _copy(optimizer: Any, made: Any, passes: int = 1) -> Any:
    """Return an object of ``made`` with an optimizer's settings, without its state."""
    config, rate = optimizer.get_config(), optimizer._learning_rate
    if callable(rate):
        config["learning_rate"] = rate  # not all functions can be deserialized
    if passes > 1:
        config["gradient_accumulation_steps"] = passes
    copy = made.from_config(config)
    for name in _KEPT:
        if name in vars(optimizer):
            setattr(copy, name, vars(optimizer)[name])
    return copy


def _with_state(optimizer: Any, copy: Any) -> Any:
    """Give a copy the variables' values, if the optimizer or its inner one has any."""
    target = copy
    if not optimizer.built and hasattr(copy, "inner_optimizer"):
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        target = copy.inner_optimizer
    if optimizer.built:
        copy.build(list(optimizer._trainable_variables))
        for variable, value in zip(target.variables, optimizer.variables, strict=True):
            variable.assign(value)
    return copy
