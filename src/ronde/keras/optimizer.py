"""Distributed optimizers of Keras 3."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from functools import partial
from typing import Any

from ronde.errors import UsageError
from ronde.keras.backends import BACKEND, front_end, keras
from ronde.keras.functions import LEGACY_CURE, CallableList
from ronde.session.gradients import (
    GradientReducer,
    LocalVariables,
    ReductionOptions,
    with_values,
)

_KERAS_2_NAMES = ("lr", "get_gradients", "compute_gradients", "_compute_gradients")
_KEPT = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""Settings of an optimizer that its config lacks."""
_Keras: Any = object  # the mixins are put before a class of Keras
_LossScaleOptimizer: Any = keras.optimizers.LossScaleOptimizer


class _ReducingOptimizer(_Keras):
    """Base of the distributed classes, put before the class of the user's optimizer."""

    # Class attributes, so that ``from_config`` gives a distributed optimizer too, and
    # Keras does not search them for variables.
    _reducer: GradientReducer
    _local: LocalVariables

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
        self._local.add(var)

    def is_finite_everywhere(self, finite: Any) -> Any:
        """Return True if ``finite`` is true on all ranks; collective."""
        return self._reducer.least(keras.ops.cast(finite, "float32")) > 0.5

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
        return self._reduce(gradients, variables)

    def _reduce(self, gradients: Any, variables: Any) -> list[Any]:
        # The training loop reads torch's gradients from the variables.
        in_place = BACKEND == "torch" and all(
            g is None or getattr(v.value, "grad", None) is g
            for g, v in zip(gradients, variables, strict=True)
        )
        results = self._local.reduce_others(
            self._reducer.reduce, gradients, variables, in_place=in_place
        )
        passes = self._reducer.options.backward_passes_per_step
        if passes == 1 or self._reducer.options.average_aggregated_gradients:
            return results
        # Keras has divided the accumulated sum by the number of passes.
        return [with_values(gradient, lambda g: g * passes) for gradient in results]


class _ReducingApply(_ReducingOptimizer):
    """Reduces gradients before clipping, weight decay and the update."""

    @property
    def _is_accumulating(self) -> bool:
        return bool(self.gradient_accumulation_steps)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        # A function, as Keras searches lists for variables of the optimizer.
        self._updated = partial(list[Any], trainable_variables)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras calls this with the mean of the accumulated gradients; on JAX in every
        # step, as it computes both branches.
        if self._is_accumulating:
            gradients, reduce = grads, partial(self._reduce, grads, self._updated())
            if BACKEND == "jax":
                is_update = (
                    self._iterations + 1
                ) % self.gradient_accumulation_steps == 0
                grads = keras.ops.cond(is_update, reduce, lambda: gradients)
            else:
                grads = reduce()
        return super()._clip_gradients(grads)


class _ReducingLossScale(_ReducingOptimizer):
    """Reduces scaled gradients before the check for infinities.

    So all ranks skip the same steps. If the inner optimizer accumulates gradients, it
    reduces their sum, and the ranks agree on the result of the check in every step.
    """

    def __init__(self, inner_optimizer: Any, *args: Any, **options: Any) -> None:
        if inner_optimizer.gradient_accumulation_steps:
            facts = {"_reducer": self._reducer, "_local": self._local}
            made = _made(_ReducingApply, type(inner_optimizer), facts)
            inner_optimizer = _copy(inner_optimizer, made)
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


def _agree_on_skipped_steps() -> None:
    """Make any loss scale around a distributed optimizer check all ranks' gradients.

    ``compile`` makes one if the model alone has the policy ``mixed_float16``. A rank
    that skipped a step alone would leave the others waiting for its gradients.
    """
    check_own = _LossScaleOptimizer.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite, inner = check_own(self, grads), self.inner_optimizer
        is_reducing = isinstance(inner, _ReducingOptimizer)
        return inner.is_finite_everywhere(finite) if is_reducing else finite

    _LossScaleOptimizer.check_finite = check_finite


_agree_on_skipped_steps()


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
    size = options.process_set.size() or 1
    to_tensor = keras.ops.convert_to_tensor
    facts: dict[str, Any] = {
        "_local": LocalVariables(options, lambda values: values / size),
        "_reducer": GradientReducer(scope, options, front_end, to_tensor),
    }
    plain = _copy(inner, type(inner), passes)
    config: dict[str, Any] = {"name": "loss_scale_optimizer"}
    if inner is not optimizer:
        config = optimizer.get_config()
        del config["inner_optimizer"]
    elif keras.config.dtype_policy().name != "mixed_float16":
        made = _made(_ReducingApply, type(plain), facts)
        return _with_state(optimizer, _copy(plain, made))
    made = _made(_ReducingLossScale, _LossScaleOptimizer, facts)
    return _with_state(optimizer, made(plain, **config))


def _made(first: Any, base: Any, facts: dict[str, Any]) -> Any:
    """Return a class; Keras saves its objects as those of ``base``."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (first, base), {**names, **facts})


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
