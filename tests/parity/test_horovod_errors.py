"""Errors of Horovod's calls: where they are raised, and Horovod's texts."""

import threading

import pytest
import torch
from tests.parity.sessions import message_of, run_cases
from tests.ranks import run_ranks_bare

import ronde.torch as hvd
from ronde.torch import mpi_ops

BEFORE_INIT = "Horovod has not been initialized; use hvd.init()."
NO_SET = "Process set provided does not exist, or has not been registered."


def test_before_init():
    run_ranks_bare(1, _before_init)


def _before_init(_: object) -> None:
    one = torch.ones(1)
    for call in (
        lambda: hvd.allreduce(one),
        lambda: hvd.allreduce_async_(one),
        lambda: hvd.grouped_allreduce([one]),
        lambda: hvd.allgather(one),
        lambda: hvd.broadcast_(one, 0),
        lambda: hvd.alltoall(one),
        lambda: hvd.reducescatter(one),
        hvd.barrier,
        hvd.join,
        lambda: hvd.poll(0),
        lambda: hvd.broadcast_object(1),
    ):
        assert message_of(hvd.HorovodInternalError, call) == BEFORE_INIT
    for query in (
        *(hvd.rank, hvd.size, hvd.local_rank, hvd.local_size),
        *(hvd.cross_rank, hvd.cross_size, mpi_ops.is_homogeneous),
        lambda: hvd.add_process_set([0]),
    ):
        assert message_of(ValueError, query) == BEFORE_INIT
    assert not hvd.is_initialized()
    hvd.shutdown()


def _at_the_call() -> None:
    one = torch.ones(hvd.size(), 2)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.grouped_allreduce_async_):
        given = [one] if call is hvd.grouped_allreduce_async_ else one
        assert message_of(ValueError, call, given, average=True, op=hvd.Sum) == (
            "The op parameter supersedes average. Please provide only one of them."
        )
    assert "op must be" in message_of(ValueError, hvd.allreduce, one, op=17)
    for tensor, op, word in (
        (torch.ones(2, dtype=torch.bool), hvd.Sum, "torch.BoolTensor"),
        (torch.ones(2, dtype=torch.bool), hvd.Average, "torch.BoolTensor"),
        (torch.ones(2, dtype=torch.complex64), hvd.Min, "torch.ComplexFloatTensor"),
        (torch.ones(2, dtype=torch.complex128), hvd.Max, "torch.ComplexDoubleTensor"),
        (torch.eye(2).to_sparse(), hvd.Sum, "torch.sparse.FloatTensor"),
    ):
        message = f"Tensor type {word} is not supported."
        assert message_of(ValueError, hvd.allreduce, tensor, op=op) == message
        assert (
            message_of(ValueError, hvd.grouped_allreduce, [one, tensor], op=op)
            == message
        )
    assert message_of(ValueError, hvd.poll, 99) == (
        "Handle 99 was not created or has been cleared."
    )
    assert hvd.synchronize(99) is None
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum, 17):
        assert message_of(hvd.HorovodInternalError, hvd.reducescatter, one, op=op) == (
            "Reducescatter currently only supports AVERAGE and SUM."
        )
    _splits(one)
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(one, average=False)[0, 0] == hvd.size()
    hvd.barrier()


def _splits(rows: torch.Tensor) -> None:
    size = hvd.size()
    for splits, message in (
        (torch.ones(1, size, dtype=torch.int32), "alltoall expects a 1D splits tensor"),
        (
            torch.ones(size),
            "alltoall expects splits to contain 32-bit integer elements.",
        ),
        (
            torch.ones(size, dtype=torch.int64),
            "alltoall expects splits to contain 32-bit integer elements.",
        ),
        (
            [0] * (size + 1),
            "Number of entries in splits does not equal number of workers.",
        ),
        (
            [2] * size,
            "Sum of splits entries is greater than the first dimension of tensor.",
        ),
    ):
        assert message_of(ValueError, hvd.alltoall, rows, splits) == message
        assert message_of(ValueError, hvd.alltoall_async, rows, splits) == message
    if size > 1:
        assert message_of(ValueError, hvd.alltoall, rows[1:]) == (
            "splits not provided, but first dimension of tensor is not an even "
            "multiple of the number of workers."
        )
        negative = [-1, *[1] * (size - 1)]
        assert "at least 0" in message_of(ValueError, hvd.alltoall, rows, negative)


def _sets() -> None:
    one = torch.ones(hvd.size(), 2)
    others = hvd.ProcessSet([0])
    calls = {
        "Allreduce": lambda s: hvd.allreduce(one, process_set=s),
        "Allgather": lambda s: hvd.allgather(one, process_set=s),
        "Broadcast": lambda s: hvd.broadcast(one, 0, process_set=s),
        "Alltoall": lambda s: hvd.alltoall(one, process_set=s),
        "Reducescatter": lambda s: hvd.reducescatter(one, process_set=s),
        "Barrier": lambda s: hvd.barrier(process_set=s),
    }
    for word, call in calls.items():
        assert message_of(ValueError, call, others) == f"{word}: {NO_SET}"
    assert others.size() is None
    assert others.rank() is None
    hvd.add_process_set(others)
    if hvd.rank() > 0:
        for word, call in calls.items():
            assert message_of(ValueError, call, others) == (
                f"{word}: Rank {hvd.rank()} is not a member of the provided "
                "process set."
            )
        assert message_of(ValueError, others.rank) == (
            "Process is not part of provided process set."
        )
    else:
        assert message_of(ValueError, hvd.broadcast, one, 1, process_set=others) == (
            "broadcast received invalid root rank 1 for provided process set"
        )
        assert message_of(
            NotImplementedError, hvd.allreduce, one, op=hvd.Adasum, process_set=others
        ) == ("Adasum does not support non-global process sets yet.")
    assert message_of(ValueError, hvd.broadcast, one, 7) == (
        "broadcast received invalid root rank 7 for provided process set"
    )
    again = hvd.ProcessSet([0])
    assert message_of(ValueError, hvd.add_process_set, again) == (
        "Attempted to add a duplicate process set: "
        "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"
    )
    every = list(range(hvd.size()))
    assert "duplicate" in message_of(ValueError, hvd.add_process_set, every)
    for ranks in ([], [hvd.size()], [-1, 0], [0, 0]):
        assert "ranks of a process set" in message_of(
            ValueError, hvd.add_process_set, ranks
        )
    assert "list of process ranks" in message_of(ValueError, hvd.ProcessSet, 3)
    assert "list of process ranks" in message_of(ValueError, hvd.ProcessSet, ["0"])
    hvd.barrier()


def _adasum_of_three() -> None:
    assert message_of(
        NotImplementedError, hvd.allreduce, torch.ones(2), op=hvd.Adasum
    ) == ("Running Adasum with non-power of 2 ranks is not supported yet.")


def _differing() -> None:
    rank = hvd.rank()
    last = hvd.size() - 1
    is_last = rank == last
    cases = {
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape": (
            lambda: hvd.allreduce(torch.ones(3 if is_last else 2), name="shape")
        ),
        "Mismatched data types: One rank had type": (
            lambda: hvd.allreduce(
                torch.ones(2, dtype=torch.int32 if is_last else torch.float32),
                name="dtype",
            )
        ),
        "Mismatched reduction operation: One rank sent reduction op": (
            lambda: hvd.allreduce(
                torch.ones(2), name="op", op=hvd.Max if is_last else hvd.Sum
            )
        ),
        "Mismatched prescale and/or postscale factors: One rank sent factors": (
            lambda: hvd.allreduce(
                torch.ones(2), name="scale", prescale_factor=0.5 if is_last else 1.0
            )
        ),
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor of rank": (
            lambda: hvd.allgather(torch.ones([2] * (3 if is_last else 2)), name="dims")
        ),
        "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1": (
            lambda: hvd.allgather(torch.ones(2, 4 if is_last else 3), name="later")
        ),
        "Mismatched BROADCAST root ranks: One rank specified root rank": (
            lambda: hvd.broadcast(torch.ones(2), 1 if is_last else 0, name="root")
        ),
        "Mismatched BROADCAST tensor shapes": (
            lambda: hvd.broadcast(torch.ones(3 if is_last else 2), 0, name="shape")
        ),
        "Mismatched REDUCESCATTER tensor shapes": (
            lambda: hvd.reducescatter(torch.ones(3 if is_last else 2), name="shape")
        ),
        "Mismatched ALLTOALL tensor shapes: One rank sent a tensor of rank": (
            lambda: hvd.alltoall(
                torch.ones([2 * hvd.size()] * (2 if is_last else 1)), name="dims"
            )
        ),
        "Process-set rank zero tried to ALLGATHER a rank-zero tensor.": (
            lambda: hvd.allgather(torch.tensor(1.0), name="scalar")
        ),
        "Process-set rank zero tried to ALLTOALL a rank-zero tensor.": (
            lambda: hvd.alltoall(torch.tensor(1.0), name="scalar")
        ),
        "Process-set rank zero tried to REDUCESCATTER a rank-zero tensor.": (
            lambda: hvd.reducescatter(torch.tensor(1.0), name="scalar")
        ),
    }
    for text, call in cases.items():
        for _ in range(2):  # the second time the name is known
            message = message_of(hvd.HorovodInternalError, call)
            assert message.startswith(text), (message, text)
        # The next one works.
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="shape")[0] == hvd.size()


def _same_name() -> None:
    for start, tensor in (
        (hvd.allreduce_async, torch.ones(4)),
        (hvd.allgather_async, torch.ones(4)),
        (lambda t, name: hvd.broadcast_async(t, 0, name), torch.ones(4)),
        (hvd.reducescatter_async, torch.ones(4)),
        (hvd.alltoall_async, torch.ones(12)),
    ):
        if hvd.rank() == 0:
            handle = start(tensor, name="twice")
            if hvd.size() > 1:
                assert message_of(ValueError, start, tensor, name="twice") == (
                    "Requested to allreduce, allgather, or broadcast a tensor with the "
                    "same name as another tensor that is currently being processed.  "
                    "If you want to request another tensor, use a different tensor "
                    "name."
                )
            hvd.barrier()
        else:
            hvd.barrier()
            handle = start(tensor, name="twice")
        hvd.synchronize(handle)


CASES = {
    "at the call": _at_the_call,
    "names in use": _same_name,
    "process sets": _sets,
    "adasum": _adasum_of_three,
    "ranks that differ": _differing,
}


@pytest.mark.parametrize("size", [1, 3])
def test_errors(size):
    cases = CASES if size == 3 else {name: CASES[name] for name in list(CASES)[:2]}
    run_cases(size, cases)


def test_after_another_rank_has_left():
    results = run_ranks_bare(3, _after_leaving)
    for message in results[:-1]:
        assert message.startswith("Horovod has been shut down.")


def _after_leaving(_: object) -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        hvd.shutdown()
        return ""
    message = message_of(hvd.HorovodInternalError, hvd.allreduce, torch.ones(1))
    # Also what was not asked for by then, and from any thread.
    messages: list[str] = []
    thread = threading.Thread(
        target=lambda: messages.append(
            message_of(hvd.HorovodInternalError, hvd.allgather, torch.ones(1))
        )
    )
    thread.start()
    thread.join()
    assert messages[0].startswith("Horovod has been shut down.")
    hvd.shutdown()
    return message
