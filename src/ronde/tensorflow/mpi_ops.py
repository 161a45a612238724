"""Horovod's collectives on TensorFlow's tensors, with the names of its ``mpi_ops``.

They work eagerly and in graphs; ``ronde.tensorflow.operations`` has the rules.
``ignore_name_scope`` is accepted for Horovod's sake: names are those of the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ronde.session import front_end
from ronde.session.front_end import *  # noqa: F403
from ronde.session.lifetime import init, shutdown
from ronde.session.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
    Sum,
    join as join_session,
)
from ronde.session.session import (
    ProcessSet,
    current_session,
    current_world,
    global_process_set,
)
from ronde.tensorflow.operations import Tensors, run, run_in_python, tf

__all__: list[str] = [
    "allgather",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "init",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "shutdown",
    "size_op",
]
__all__ += front_end.__all__

Name = str | None
Tensor = Any
_ALL = global_process_set


def _reduction(kind: type[Allreduce | Reducescatter]) -> Callable[..., Tensor]:
    """Return Horovod's private function for a dense tensor."""

    def reduce(
        tensor: Tensor,
        name: Name = None,
        op: int = Sum,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        ignore_name_scope: bool = False,
        process_set: ProcessSet = _ALL,
    ) -> Tensor:
        del ignore_name_scope
        factors = (op, prescale_factor, postscale_factor)
        return run(kind(process_set, name, False, *factors), [tensor])[0]

    return reduce


def _grouped_reduction(
    kind: type[Allreduce | Reducescatter],
) -> Callable[..., list[Tensor]]:
    """Return Horovod's private function for dense tensors, reduced in one call."""

    def reduce(
        tensors: Tensors,
        name: Name = None,
        op: int = Sum,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        ignore_name_scope: bool = False,
        process_set: ProcessSet = _ALL,
    ) -> list[Tensor]:
        del ignore_name_scope
        factors = (op, prescale_factor, postscale_factor)
        return run(kind(process_set, name, True, *factors), tensors)

    return reduce


_allreduce = _reduction(Allreduce)
"""Names that Horovod's users import, although they are private."""
_grouped_allreduce = _grouped_reduction(Allreduce)
_reducescatter = _reduction(Reducescatter)
_grouped_reducescatter = _grouped_reduction(Reducescatter)


def allgather(
    tensor: Tensor,
    name: Name = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0.

    The size of dimension 0 may differ between ranks.
    """
    del ignore_name_scope
    return run(Allgather(process_set, name), [tensor])[0]


def grouped_allgather(
    tensors: Tensors,
    name: Name = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """Gather several tensors in one call."""
    del ignore_name_scope
    return run(Allgather(process_set, name, is_group=True), tensors)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: Name = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = _ALL,
) -> Tensor:
    """Return the tensor of ``root_rank``, which is global even in a process set."""
    del ignore_name_scope
    return run(Broadcast(process_set, name, root_rank=root_rank), [tensor])[0]


def broadcast_(
    variables: Tensors,
    root_rank: int,
    name: Name = None,
    process_set: ProcessSet = _ALL,
) -> list[Tensor]:
    """Assign the values of ``root_rank`` to ``tf.Variable`` objects; collective.

    Raises ``ValueError`` for a mixture of resource and reference variables.
    """
    if len({hasattr(variable, "handle") for variable in variables}) > 1:
        raise ValueError(
            "All variables passed to broadcast_() should be of the same kind, resource "
            "or reference"
        )
    collective = Broadcast(process_set, name, True, root_rank=root_rank)
    values = run(collective, variables, is_differentiable=False)
    return [each.assign(value) for each, value in zip(variables, values, strict=True)]


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: Name = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Send rows of dimension 0 to each rank, and return the received rows.

    With ``splits``, the int32 number of rows for each rank, the result is a pair: the
    received rows in rank order, and the number from each rank.
    """
    del ignore_name_scope
    given = [tensor]
    if splits is not None:
        given.append(tf.convert_to_tensor(splits, dtype=tf.int32))
    received, counts = run(Alltoall(process_set, name), given)
    return received if splits is None else (received, counts)


def join() -> Tensor:
    """Contribute zeros until all ranks have joined; return the last rank (int32)."""
    return run_in_python("HorovodJoin", join_session, tf.int32)


def size_op(process_set_id: int = 0, name: Name = None) -> Tensor:
    """Return the number of ranks of a process set, read when the operation runs."""
    read = lambda: len(_ranks_of(process_set_id))  # noqa: E731
    return run_in_python(name or "HorovodSize", read, tf.int32)


def process_set_included_op(process_set_id: int = 0, name: Name = None) -> Tensor:
    """Return 1 if this rank is in a process set, else 0; read when it runs."""
    read = lambda: int(current_world().rank in _ranks_of(process_set_id))  # noqa: E731
    return run_in_python(name or "HorovodProcessSetIncluded", read, tf.int32)


def _ranks_of(process_set_id: int) -> Sequence[int]:
    return current_session().sets.get(process_set_id, ())


def rank_op(name: Name = None) -> Tensor:
    """Return this process's rank, read when the operation runs."""
    return run_in_python(name or "HorovodRank", lambda: current_world().rank, tf.int32)


def local_rank_op(name: Name = None) -> Tensor:
    """Return this process's rank on its host, read when the operation runs."""
    read = lambda: current_world().local_rank  # noqa: E731
    return run_in_python(name or "HorovodLocalRank", read, tf.int32)


def local_size_op(name: Name = None) -> Tensor:
    """Return the number of ranks on this host, read when the operation runs."""
    read = lambda: current_world().local_size  # noqa: E731
    return run_in_python(name or "HorovodLocalSize", read, tf.int32)


class _Basics:
    """Horovod's object of queries."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(name)
        return globals()[name]

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {key: list(ranks) for key, ranks in current_session().sets.items()}

    def _comm_process_set_id(self, comm: Any) -> int:
        ranks = tuple(ProcessSet(comm).ranks)
        found = [i for i, each in current_session().sets.items() if each == ranks]
        return found[0] if found else -1


_basics = _Basics()
