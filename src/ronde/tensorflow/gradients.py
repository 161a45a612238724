"""Reduction of gradients: tapes, and optimizers of ``tf.compat.v1.train``.

All dense gradients of a dtype are reduced in one call. Gradients that are None stay so,
on all ranks alike.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, cast

from ronde.errors import UsageError
from ronde.session.frameworks import import_framework
from ronde.session.operations import Adasum, Average
from ronde.session.session import ProcessSet, current_session, global_process_set, rank
from ronde.tensorflow.aggregation import (
    AllreduceGrads,
    LocalGradientAggregationHelper,
    LocalVariables,
    choose,
    state_variable,
    variable_key,
)
from ronde.tensorflow.compression import Compression
from ronde.tensorflow.functions import grouped_allreduce

tf = import_framework("tensorflow")
_LegacyOptimizer: Any = tf.compat.v1.train.Optimizer

Groups = int | list[list[Any]] | None


def _is_reduced(process_set: ProcessSet) -> bool:
    if not process_set.included():
        return False
    # The size of a view may change while a graph lives.
    return process_set.size() != 1 or current_session().is_of_views


def _reduction(
    name: str,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
) -> AllreduceGrads:
    """Return a function that reduces gradients, by names that begin with ``name``.

    It takes gradients, their variables (needed for lists in ``groups``), and whether
    to name the calls ``grad_<number>`` without any scope.
    """
    factor = gradient_predivide_factor if op == Average else 1.0
    options: dict[str, Any] = {
        "compression": compression,
        "op": op,
        "process_set": process_set,
    }

    def allreduce_grads(
        grads: Iterable[Any],
        vars: Sequence[Any] | None = None,  # noqa: A002
        use_generic_names: bool = False,
    ) -> list[Any]:
        results = list(grads)
        if sparse_as_dense:
            results = [_dense(gradient) for gradient in results]
        if not _is_reduced(process_set):
            return results
        if tf.distribute.has_strategy():
            raise UsageError(
                "gradients must be reduced outside tf.distribute. Start one rank for "
                "each device instead."
            )
        is_scoped = not use_generic_names
        with (
            tf.name_scope(f"{name}_Allreduce") if is_scoped else nullcontext() as scope
        ):
            prefix = scope if tf.executing_eagerly() else ""  # a graph adds the scope
            for number, (part, members) in enumerate(_calls(results, vars, groups)):
                is_sparse = part.startswith("sparse")
                # Sparse gradients support no factors but 1.
                reduced = grouped_allreduce(
                    [results[i] for i in members],
                    **options,
                    prescale_factor=1.0 if is_sparse else 1.0 / factor,
                    postscale_factor=1.0 if is_sparse else factor,
                    name=f"{prefix}{part}" if is_scoped else f"grad_{number}",
                )
                for i, gradient in zip(members, reduced, strict=True):
                    results[i] = gradient
        return results

    return allreduce_grads


def _make_allreduce_grads_fn(  # pyright: ignore[reportUnusedFunction]
    name: str, device_dense: str, device_sparse: str, *options: Any
) -> AllreduceGrads:
    """Do the same with Horovod's arguments; devices are ignored."""
    del device_dense, device_sparse
    return _reduction(name, *options)


def _dense(gradient: Any) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_sparse else gradient


def _calls(
    gradients: Sequence[Any], variables: Sequence[Any] | None, groups: Groups
) -> Iterator[tuple[str, list[int]]]:
    """Yield the name of each grouped reduction and the indices of its gradients."""
    given = [i for i, gradient in enumerate(gradients) if gradient is not None]
    parts = list(_parts(given, variables, groups))
    for number, part in enumerate(parts):
        label = f"{number}." if len(parts) > 1 else ""
        kinds: dict[str, list[int]] = {}
        for i in part:
            is_sparse = isinstance(gradients[i], tf.IndexedSlices)
            kind = "sparse" if is_sparse else "grads"
            name = f"{kind}.{label}{gradients[i].dtype.name}"
            kinds.setdefault(name, []).append(i)
        yield from kinds.items()


def _parts(
    given: list[int], variables: Sequence[Any] | None, groups: Groups
) -> Iterator[list[int]]:
    """Yield non-empty parts of the indices: ``groups``, and others as the last part."""
    if isinstance(groups, list):
        keys = {variable_key(variables[i]): i for i in given} if variables else {}
        for group in groups:
            found = [keys.pop(variable_key(each), None) for each in group]
            if part := [i for i in found if i is not None]:
                yield part
        given, groups = sorted(keys.values()), 1
    count = min(groups or 1, len(given))
    for number in range(count):
        ends = (number * len(given) // count, (number + 1) * len(given) // count)
        yield given[slice(*ends)]


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
    groups = _check(op, gradient_predivide_factor, num_groups, groups)
    base: Any = gradtape.__class__
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made: Any = object.__new__(
        type(base.__name__, (_DistributedGradientTape, base), names)
    )
    vars(made).update(vars(gradtape), _recording=False)
    made.process_set = process_set
    made._local = LocalVariables(process_set, is_scaled=scale_local_gradients)
    made._allreduce_grads = _reduction(
        "DistributedGradientTape",
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        groups,
        process_set,
    )
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
    layers: list[Any] = [] if local_layers is None else [local_layers]
    if isinstance(local_layers, Iterable):
        layers = list(cast("Iterable[Any]", local_layers))
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise UsageError("All local layers must be of tf.keras.layers.Layer type.")
    tape = DistributedGradientTape(gradtape, *args, **options)
    for variable in [v for layer in layers for v in layer.trainable_weights]:
        tape.register_local_source(variable)
    return tape


class _Wrapper(_LegacyOptimizer):
    """A wrapper of an optimizer, with the state of that optimizer."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self._optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """A legacy optimizer that reduces gradients when it computes them."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        **options: Any,
    ) -> None:
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(optimizer, name, use_locking)
        passes = options.pop("backward_passes_per_step", 1)
        is_average = options.pop("average_aggregated_gradients", False)
        is_scaled = options.pop("scale_local_gradients", True)
        self._allreduce_grads = _reduction(name, **options)
        self.process_set = options.get("process_set", global_process_set)
        self._local = LocalVariables(self.process_set, is_scaled=is_scaled)
        self._agg_helper: LocalGradientAggregationHelper | None = None
        if passes == 1:
            return
        if tf.executing_eagerly():
            raise UsageError(
                "backward_passes_per_step > 1 is not yet supported for "
                "_LegacyOptimizer with eager execution."
            )
        self._agg_helper = LocalGradientAggregationHelper(
            passes,
            self._allreduce_grads,
            options.get("sparse_as_dense", False),
            is_average,
            rank(),
            "optimizer_type_legacy",
            self.process_set,
            is_scaled,
            name,
        )

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local.add(var)
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return pairs (reduced gradient, variable); collective."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        if self._agg_helper is not None:
            found = self._agg_helper.compute_gradients(gradients, variables)
        else:
            found = self._local.reduce_others(
                self._allreduce_grads, gradients, variables
            )
        return list(zip(found, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Any],
        global_step: Any = None,
        name: str | None = None,
    ) -> Any:
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        if self._agg_helper is None:
            return apply()
        return self._agg_helper.apply_gradients(
            apply, self._optimizer, pairs, global_step=global_step
        )


class _DistributedAdasumOptimizer(_Wrapper):
    """A legacy optimizer that takes local steps and combines the deltas by Adasum."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        name = name or f"DistributedDelta{type(optimizer).__name__}"
        super().__init__(optimizer, name, use_locking)
        self._combine = _reduction(name, compression, op=Adasum)
        self._passes = backward_passes_per_step
        self._starts: dict[Any, Any] = {}  # by key: the value after the last reduction
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
        key = variable_key(variable)
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
    groups = _check(op, gradient_predivide_factor, num_groups, groups)
    if op == Adasum and average_aggregated_gradients:
        raise UsageError("Adasum does not support average_aggregated_gradients == True")
    is_legacy = isinstance(optimizer, _LegacyOptimizer)
    if op == Adasum and not is_legacy:
        raise UsageError("op == Adasum is not supported yet with Keras")
    if op == Adasum:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum does not support process sets yet")
        return _DistributedAdasumOptimizer(
            optimizer,
            name,
            use_locking,
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
        )
    options: dict[str, Any] = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if is_legacy:
        return _DistributedOptimizer(optimizer, name, use_locking, **options)
    keras = import_module("ronde.tensorflow.keras")
    return keras.DistributedOptimizer(optimizer, name, **options)


def _check(op: int, factor: float, num_groups: int, groups: Groups) -> Groups:
    """Refuse invalid arguments; return the groups."""
    if factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed "
            "in v0.23.0.",
            DeprecationWarning,
            stacklevel=3,
        )
        groups = num_groups if groups is None else groups
    if not (groups is None or isinstance(groups, list) or groups > 0):
        raise UsageError(
            "groups should be a non-negative integer or a list of list of tf.Variable."
        )
    return groups
