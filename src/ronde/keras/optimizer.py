"""Distributed optimizers of Keras 3."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from ronde.errors import UsageError
from ronde.keras.gradients import Compression, GradientReduction, keras
from ronde.keras.options import LEGACY_CURE, ReductionOptions, is_keras_2
from ronde.session.operations import Average
from ronde.session.session import ProcessSet, global_process_set

_KERAS_2_NAMES = ("lr", "get_gradients", "compute_gradients", "_compute_gradients")
_KEPT = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""Settings of an optimizer that its config lacks."""


class CallableList(list[Any]):
    """A list that returns itself when called, as ``optimizer.variables()`` did."""

    def __call__(self) -> "CallableList":
        return self


@dataclass(frozen=True, slots=True)
class _Variables:
    """Variables by key, in an object that Keras does not search for variables."""

    by_key: dict[Any, Any]


class _ReducingOptimizer:
    """Base of the distributed classes, put before the class of the user's optimizer."""

    # Class attributes, so that ``from_config`` gives a distributed optimizer too.
    _reduction: GradientReduction
    _local = _Variables({})
    # Keras's.
    gradient_accumulation_steps: int | None
    _trainable_variables: Sequence[Any]

    @property
    def variables(self) -> CallableList:
        return CallableList(cast("Any", super()).variables)

    @property
    def local_keys(self) -> "dict[Any, Any]":
        return self._local.by_key

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        key = cast("Any", self)._var_key(var)  # noqa: SLF001  Keras's
        self._local = _Variables({**self._local.by_key, key: var})

    def __getattr__(self, name: str) -> Any:
        if name in _KERAS_2_NAMES:
            raise AttributeError(
                f"an optimizer of Keras 3 has no {name}. {LEGACY_CURE}", name=name
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}",
            name=name,
            obj=self,
        )

    def _reduced(
        self, gradients: Sequence[Any], variables: Any, *, is_owned: bool = False
    ) -> list[Any]:
        variables = self._trainable_variables if variables is None else variables
        return self._reduction.reduce(gradients, variables, self, is_owned=is_owned)


class _ReducingApply(_ReducingOptimizer):
    """Reduces gradients before clipping, weight decay and the update."""

    _pending: Any = None  # variables of the update in progress

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.gradient_accumulation_steps:
            gradients = self._reduced(gradients, trainable_variables)
        cast("Any", super()).apply(gradients, trainable_variables)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        self._pending = _Variables(dict(enumerate(list[Any](trainable_variables))))
        cast("Any", super())._backend_apply_gradients(grads, trainable_variables)  # noqa: SLF001

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras calls this with the mean of the accumulated gradients; on JAX in every
        # step, as it computes both branches.
        steps = self.gradient_accumulation_steps
        if steps:
            variables = list(self._pending.by_key.values())

            def reduced() -> list[Any]:
                return self._reduced(grads, variables, is_owned=True)

            if keras.backend.backend() == "jax":
                is_update = (cast("Any", self)._iterations + 1) % steps == 0  # noqa: SLF001
                grads = keras.ops.cond(is_update, reduced, lambda: list(grads))
            else:
                grads = reduced()
        return cast("Any", super())._clip_gradients(grads)  # noqa: SLF001


class _ReducingLossScale(_ReducingOptimizer):
    """Reduces scaled gradients before the check whether they are finite.

    So all ranks skip the same steps. If the inner optimizer accumulates gradients, it
    reduces their sum, and the ranks agree on the result of the check in every step.
    """

    def __init__(self, inner_optimizer: Any, *args: Any, **options: Any) -> None:
        if inner_optimizer.gradient_accumulation_steps:
            inner_optimizer = _distributed(inner_optimizer, self._reduction)
        cast("Any", super()).__init__(inner_optimizer, *args, **options)

    @property
    def _is_accumulating(self) -> bool:
        return bool(cast("Any", self).inner_optimizer.gradient_accumulation_steps)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self._is_accumulating:
            gradients = self._reduced(gradients, trainable_variables)
        cast("Any", super()).apply(gradients, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        if not self._is_accumulating:
            grads = self._reduced(grads, None)
        return cast("Any", super()).stateless_apply(
            optimizer_variables, grads, trainable_variables
        )

    def check_finite(self, grads: Any) -> Any:
        finite = cast("Any", super()).check_finite(grads)
        return self._reduction.all_agree(finite) if self._is_accumulating else finite

    def register_local_var(self, var: Any) -> None:
        super().register_local_var(var)
        if self._is_accumulating:
            cast("Any", self).inner_optimizer.register_local_var(var)


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
    reduction = GradientReduction(scope, options)
    plain = _copy(inner, type(inner), passes)
    scaling: Any = keras.optimizers.LossScaleOptimizer
    config: dict[str, Any] = {"name": "loss_scale_optimizer"}
    if inner is not optimizer:
        scaling, config = type(optimizer), optimizer.get_config()
        del config["inner_optimizer"]
    elif keras.config.dtype_policy().name != "mixed_float16":
        return _with_state(optimizer, _distributed(plain, reduction))
    copy = _reducing(_ReducingLossScale, scaling, reduction)(plain, **config)
    return _with_state(optimizer, copy)


def _distributed(optimizer: Any, reduction: GradientReduction) -> Any:
    return _copy(optimizer, _reducing(_ReducingApply, type(optimizer), reduction))


def _reducing(first: Any, base: Any, reduction: GradientReduction) -> Any:
    """Return a class whose objects Keras saves as objects of ``base``."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (first, base), {**names, "_reduction": reduction})


def _copy(optimizer: Any, made: Any, passes: int = 1) -> Any:
    """Return an object of ``made`` with an optimizer's settings, without its state."""
    config, rate = optimizer.get_config(), optimizer._learning_rate  # noqa: SLF001
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
        copy.build(list(optimizer._trainable_variables))  # noqa: SLF001  Keras's
        for variable, value in zip(target.variables, optimizer.variables, strict=True):
            variable.assign(value)
    return copy


def DistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Return a copy of an optimizer that reduces gradients over all ranks.

    Its class has the name of the optimizer's class, and a saved model loads without
    ronde. Gradients are reduced in one call, before clipping and weight decay; with
    accumulation, only their sum is. The state of a built optimizer is copied.

    Args:
        optimizer: An optimizer of Keras 3 or of tf-keras.
        name: The name by which reductions are matched across ranks. Give one if a
            program trains with several optimizers of a class at a time.
        device_dense: Ignored.
        device_sparse: Ignored.
        compression: The format for sending dense gradients.
        sparse_as_dense: Reduce ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: Divide by this before the sum, and multiply after.
        op: Average or Sum.
        num_groups: The old name of ``groups``.
        groups: A number of calls to split the reduction into, or lists of variables.
        process_set: The ranks that reduce with each other.
        scale_local_gradients: Divide gradients of local variables by the set's size.
        backward_passes_per_step: Accumulate this many gradients before a reduction.
        average_aggregated_gradients: Divide the accumulated sum by their number.
    """
    del device_dense, device_sparse
    options = ReductionOptions(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups,
        process_set,
        scale_local_gradients,
        backward_passes_per_step,
        average_aggregated_gradients,
    ).checked(num_groups)
    if is_keras_2(optimizer):
        legacy = import_module("ronde.tensorflow.keras.optimizer")
        return legacy.distribute(optimizer, name, options)
    return distribute(optimizer, name, options)


def PartialDistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return ``DistributedOptimizer(...)`` that does not reduce ``local_layers``.

    ``local_layers`` is a layer or a collection of layers. Their gradients stay local.
    """
    layers: list[Any] = [] if local_layers is None else [local_layers]
    if isinstance(local_layers, Iterable):
        layers = [*cast("Iterable[Any]", local_layers)]
    # Not by class: layers are of Keras 2 or of Keras 3.
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise UsageError("All local layers must be of tf.keras.layers.Layer type.")
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for layer in layers:
        for variable in layer.trainable_weights:
            distributed.register_local_var(variable)
    return distributed
