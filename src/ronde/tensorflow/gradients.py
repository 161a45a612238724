"""Reduction of gradients: tapes, and optimizers of ``tf.compat.v1.train``."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from ronde.errors import UsageError
from ronde.keras.functions import distribute
from ronde.session.frameworks import import_framework
from ronde.session.gradients import (
    GradientReducer,
    Groups,
    LocalVariables,
    ReductionOptions,
    variables_of_layers,
)
from ronde.session.operations import Adasum, Average
from ronde.session.session import ProcessSet, global_process_set
from ronde.tensorflow import functions
from ronde.tensorflow.aggregation import (
    AllreduceGrads,
    LocalGradientAggregationHelperEager,
    choose,
    local_variables,
    state_variable,
)
from ronde.tensorflow.compression import Compression

tf = import_framework("tensorflow")
_LegacyOptimizer: Any = tf.compat.v1.train.Optimizer


def _reduction(scope: str, options: ReductionOptions) -> AllreduceGrads:
    """Return a function that reduces gradients, by names that begin with ``scope``."""
    reducer = GradientReducer(scope, options, functions, tf.convert_to_tensor)
    return tf.autograph.experimental.do_not_convert(reducer.reduce)


def _make_allreduce_grads_fn(  # pyright: ignore[reportUnusedFunction]
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
) -> AllreduceGrads:
    """Do the same with Horovod's arguments; devices are ignored."""
    del device_dense, device_sparse
    factor = gradient_predivide_factor if op == Average else 1.0
    options = ReductionOptions(compression, sparse_as_dense, factor, op)
    options = options._replace(groups=groups, process_set=process_set)
    return _reduction(name, options)


class _DistributedGradientTape:
    """Base of the distributed tapes, put before the class of the user's tape."""

    _allreduce_grads: AllreduceGrads
    _local: LocalVariables
    process_set: ProcessSet

    def register_local_source(self, source: Any) -> None:
        """Exclude the gradients of a source from the reduction."""
        self._local.add(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return reduced gradients in the structure of ``sources``; collective."""
        own = cast("Any", super()).gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        reduced = self._local.reduce_others(
            self._allreduce_grads,
            tf.nest.flatten(own),
            tf.nest.flatten(sources),
            use_generic_names=use_generic_names,
        )
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs (source, gradient) of local and of other sources; collective."""
        found = self.gradient(target, sources, output_gradients, use_generic_names)
        flat = tf.nest.flatten(sources), tf.nest.flatten(found)
        pairs = list(zip(*flat, strict=True))
        local = [pair for pair in pairs if pair[0] in self._local]
        return local, [pair for pair in pairs if pair[0] not in self._local]


def DistributedGradientTape(  # noqa: N802  Horovod's
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with the records of ``gradtape`` that reduces gradients.

    Its class is a new subclass of the tape's class with the same name. ``groups``
    splits the reduction: a number of parts, or lists of variables.
    """
    del device_dense, device_sparse
    options = ReductionOptions(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    ).checked()
    base: Any = gradtape.__class__
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made: Any = object.__new__(
        type(base.__name__, (_DistributedGradientTape, base), names)
    )
    vars(made).update(vars(gradtape), _recording=False)
    made.process_set, made._local = process_set, local_variables(options)
    made._allreduce_grads = _reduction("DistributedGradientTape", options)
    return made


def PartialDistributedGradientTape(  # noqa: N802  Horovod's
    gradtape: Any,
    *args: Any,
    local_layers: Any = None,
    **options: Any,
) -> Any:
    """Return ``DistributedGradientTape(...)`` that does not reduce ``local_layers``.

    ``local_layers`` is a layer or a collection of layers.
    """
    local = variables_of_layers(local_layers)
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in local:
        tape.register_local_source(variable)
    return tape


class OptimizerReduction:
    """The reduction of an optimizer's gradients, of one or of several passes."""

    def __init__(self, scope: str, options: ReductionOptions) -> None:
        self._reduce = _reduction(scope, options)
        self._local = local_variables(options)
        self.helper: LocalGradientAggregationHelperEager | None = None
        if options.backward_passes_per_step > 1:
            self.helper = LocalGradientAggregationHelperEager(
                options.backward_passes_per_step,
                self._reduce,
                options.sparse_as_dense,
                options.average_aggregated_gradients,
                options.process_set,
                options.scale_local_gradients,
            )

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local.add(var)
        if self.helper is not None:
            self.helper.register_local_var(var)

    def reduce(self, pairs: Iterable[Any]) -> list[Any]:
        """Return pairs (reduced gradient, variable); collective."""
        gradients, variables = zip(*pairs, strict=True)
        if self.helper is not None:
            found = self.helper.compute_gradients(gradients, variables)
        else:
            found = self._local.reduce_others(self._reduce, gradients, variables)
        return list(zip(found, variables, strict=True))

    def apply(
        self, apply: Callable[[], Any], optimizer: Any, *pairs: Any, **options: Any
    ) -> Any:
        """Call ``apply`` in the last pass of a step; in others, count the pass."""
        if self.helper is None:
            return apply()
        return self.helper.apply_gradients(apply, optimizer, *pairs, **options)


class _Wrapper(_LegacyOptimizer):
    """A wrapper of an optimizer, with the state of that optimizer."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self.get_slot, self.variables = optimizer.get_slot, optimizer.variables
        self.get_slot_names = optimizer.get_slot_names

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._optimizer.compute_gradients(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """A legacy optimizer that reduces gradients when it computes them."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, options: ReductionOptions
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        if options.backward_passes_per_step > 1 and tf.executing_eagerly():
            raise UsageError(
                "backward_passes_per_step > 1 is not yet supported for "
                "_LegacyOptimizer with eager execution."
            )
        self.process_set = options.process_set
        self._reduction = OptimizerReduction(name, options)
        self.register_local_var = self._reduction.register_local_var

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return pairs (reduced gradient, variable); collective."""
        return self._reduction.reduce(super().compute_gradients(*args, **kwargs))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Any],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        pairs, inner = list(grads_and_vars), self._optimizer

        def apply() -> Any:
            return inner.apply_gradients(pairs, global_step, name)

        return self._reduction.apply(apply, inner, pairs, global_step=global_step)


class _DistributedAdasumOptimizer(_Wrapper):
    """A legacy optimizer that takes local steps and combines the deltas by Adasum."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, options: ReductionOptions
    ) -> None:
        super().__init__(optimizer, name, use_locking)
        self._combine = _reduction(name, options)
        self._passes = options.backward_passes_per_step
        # By reference: the value after the last reduction.
        self._starts: dict[Any, Any] = {}
        self._steps: Any = None

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Any],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        """Take a local step; in every last pass, combine the deltas; collective."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        if self._steps is None:
            self._steps = state_variable("delta_steps", (), tf.int64)
        starts = [self._start_of(variable) for variable in variables]
        every = list(zip(variables, starts, strict=True))
        step = self._steps.assign_add(1)

        def begin() -> Any:
            return tf.group(*[start.assign(v) for v, start in every])

        def combine() -> Any:
            deltas = [v - start for v, start in every]
            combined = self._combine(deltas, variables)
            sums = [s + d for s, d in zip(starts, combined, strict=True)]
            return tf.group(
                *[v.assign(x) for v, x in zip(variables, sums, strict=True)]
            )

        with tf.control_dependencies([step]):
            begun = choose(tf.equal((step - 1) % self._passes, 0), begin, tf.no_op)
        with tf.control_dependencies([] if begun is None else [begun]):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([] if applied is None else [applied]):
            return choose(tf.equal(step % self._passes, 0), combine, tf.no_op)

    def _start_of(self, variable: Any) -> Any:
        key = variable.ref()
        if key not in self._starts:
            made = state_variable("delta_start", variable.shape, variable.dtype)
            self._starts[key] = made
        return self._starts[key]


def DistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over the ranks of ``process_set``.

    Optimizers of Keras are given to ``ronde.tensorflow.keras``. With ``op=Adasum`` a
    legacy optimizer takes local steps, and the changes of the variables are combined.
    """
    del device_dense, device_sparse
    options = ReductionOptions(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        backward_passes_per_step,
        average_aggregated_gradients,
    ).checked()
    if op == Adasum and average_aggregated_gradients:
        raise UsageError("Adasum does not support average_aggregated_gradients == True")
    if not isinstance(optimizer, _LegacyOptimizer):
        if op == Adasum:
            raise UsageError("op == Adasum is not supported yet with Keras")
        return distribute(optimizer, name, options)
    label = type(optimizer).__name__
    if op != Adasum:
        name = name or f"Distributed{label}"
        return _DistributedOptimizer(optimizer, name, use_locking, options)
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support process sets yet")
    name = name or f"DistributedDelta{label}"
    return _DistributedAdasumOptimizer(optimizer, name, use_locking, options)
