"""Reductions of any tensor, also sparse ones; broadcasts of variables and objects."""

from collections.abc import Callable, Iterable
from typing import Any

from ronde.keras.functions import GLOBAL_VARIABLES
from ronde.session.gradients import compress, is_sparse
from ronde.session.operations import (
    Adasum,
    Allreduce,
    Average,
    Reducescatter,
    Sum,
    allgather_object as allgather_object_of,
    broadcast_object as broadcast_object_of,
    choose_op,
)
from ronde.session.session import ProcessSet, global_process_set
from ronde.tensorflow.compression import Compression
from ronde.tensorflow.mpi_ops import broadcast_, grouped_allgather, size_op
from ronde.tensorflow.operations import Tensors, run, tf

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "allreduce",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "reducescatter",
]

Tensor = Any
Name = str | None
_ALL = global_process_set


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Name = None,
    process_set: ProcessSet = _ALL,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Return the reduction of a tensor over all ranks; differentiable.

    ``IndexedSlices`` are gathered: Sum and Average only, without factors.
    ``device_dense`` and ``device_sparse`` place the result.
    """
    del ignore_name_scope
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, False, *factors)
    devices = (device_dense, device_sparse)
    return _reduce(collective, [tensor], compression, devices)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = _ALL,
    ignore_name_scope: bool = False,
    name: Name = None,
) -> list[Tensor]:
    """Return the reductions of several tensors, dense or ``IndexedSlices``.

    All dense tensors are reduced in one call.
    """
    del ignore_name_scope
    factors = (choose_op(op, average), prescale_factor, postscale_factor)
    collective = Allreduce(process_set, name, True, *factors)
    return _reduce(collective, tensors, compression, (device_dense, device_sparse))


def _reduce(
    collective: Allreduce,
    tensors: Tensors,
    compression: Any,
    devices: tuple[str, str],
) -> list[Tensor]:
    collective.process_set.size()  # refuses an unknown set, while the graph is built
    results = dict[int, Tensor]()
    sparse = [i for i, t in enumerate(tensors) if is_sparse(t)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse:
        _require_gathered(collective)
        with tf.device(devices[1]):
            gathered = _gather(collective, [tensors[i] for i in sparse])
        results.update(zip(sparse, gathered, strict=True))
    if dense:
        with tf.device(devices[0]):
            given = [tf.convert_to_tensor(tensors[i]) for i in dense]
            reduced = _run_compressed(collective, compression, given)
        results.update(zip(dense, reduced, strict=True))
    return [results[i] for i in range(len(tensors))]


def _gather(collective: Allreduce, slices: Tensors) -> list[Tensor]:
    """Return the sums or averages of ``IndexedSlices``, as all ranks' slices."""
    name, process_set = collective.name, collective.process_set
    parts: list[list[Tensor]] = []
    for part in ("values", "indices"):
        given = [getattr(each, part) for each in slices]
        label = name and f"{name}_{part}"
        parts.append(grouped_allgather(given, label, process_set=process_set))
    values, indices = parts
    if collective.op == Average:
        size = size_op(process_set.process_set_id or 0)
        values = [_divided(value, size) for value in values]
    return [
        tf.IndexedSlices(value, index, dense_shape=each.dense_shape)
        for value, index, each in zip(values, indices, slices, strict=True)
    ]


def _divided(values: Tensor, size: Tensor) -> Tensor:
    divide = tf.truncatediv if values.dtype.is_integer else tf.truediv
    return divide(values, tf.cast(size, values.dtype))


def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: Name = None,
    process_set: ProcessSet = _ALL,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over all ranks and return this rank's rows of dimension 0."""
    del ignore_name_scope
    _require_sum(op)
    factors = (op, prescale_factor, postscale_factor)
    with tf.device(device_dense):
        collective = Reducescatter(process_set, name, False, *factors)
        given = [tf.convert_to_tensor(tensor)]
        return _run_compressed(collective, compression, given)[0]


def grouped_reducescatter(
    tensors: Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = _ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: Name = None,
) -> list[Tensor]:
    """Reduce several tensors in one call and return this rank's rows of each."""
    _require_sum(op)
    factors = (op, prescale_factor, postscale_factor)
    with tf.device(device_dense):
        collective = Reducescatter(process_set, name, True, *factors)
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        return _run_compressed(collective, compression, given)


def _run_compressed(
    collective: Allreduce | Reducescatter,
    compression: Any,
    tensors: Tensors,
) -> list[Tensor]:
    pairs = [compress(compression, tensor) for tensor in tensors]
    results = run(collective, [wire for wire, _ in pairs])
    return [finish(each) for each, (_, finish) in zip(results, pairs, strict=True)]


def _require_sum(op: int) -> None:
    if op not in (Average, Sum):
        raise NotImplementedError("Only Sum and Average ops are supported.")


def _require_gathered(collective: Allreduce) -> None:
    op, factors = collective.op, (collective.prescale, collective.postscale)
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a "
            "workaround please pass sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Average, Sum):
        raise NotImplementedError(
            "Only Sum and Average ops are supported with tf.IndexedSlices"
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "Pre/postscale_factor are not supported with tf.IndexedSlices"
        )


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """Return the operation that ``op`` or its deprecated form ``average`` selects."""
    return choose_op(op, average)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return True if Adasum supports this number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


# Variables and objects


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = _ALL,
    inplace: bool = False,
) -> Any:
    """Assign the values of ``root_rank`` to variables of all ranks; collective.

    Variables may be TensorFlow's or those of Keras. In a graph this returns the
    operation. ``inplace`` makes no difference: the root's values always arrive in one
    call, in new tensors, as a variable's memory may have other readers.
    """
    del inplace
    found = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    return tf.group(*broadcast_(found, root_rank, process_set=process_set))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Return ``root_rank``'s object on every rank; collective.

    The object can be anything that cloudpickle supports. ``session`` is ignored: the
    object does not pass through a graph.
    """
    del session
    return broadcast_object_of(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts its argument like ``broadcast_object``."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> list[Any]:
    """Return a list of all ranks' objects; collective, like ``broadcast_object``."""
    del session
    return allgather_object_of(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return an operation that broadcasts all global variables of TensorFlow 1."""
    if tf.executing_eagerly():
        raise RuntimeError(GLOBAL_VARIABLES)
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A session hook that broadcasts all global variables when a session begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Make the operation, in the session's graph."""
        if self.bcast_op is None or self.bcast_op.graph is not _graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast the variables."""
        del coord
        session.run(self.bcast_op)


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()
