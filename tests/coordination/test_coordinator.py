"""Coordinators on real ranks: order, threads, errors, deaths, stalls, idle cost."""

import logging
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext

import pytest
import torch
from tests.combinations import all_on_three_ranks
from tests.coordination.coordinators import (
    NEVER_S,
    ON_ALL,
    ON_THREE,
    coordinating,
    operation,
    run_coordinated,
    summed,
)
from tests.limits import HANG_S
from tests.ranks import run_ranks_bare
from tests.resources import least_when_idle, num_frames

from ronde.collectives import Connections, ReduceOp
from ronde.coordination import CoordinationOptions, NamedOperation, OpKind
from ronde.errors import CollectiveError, PeerLostError, UsageError

MOVING = [
    OpKind.ALLREDUCE,
    OpKind.ALLGATHER,
    OpKind.BROADCAST,
    OpKind.ALLTOALL,
    OpKind.REDUCESCATTER,
    OpKind.BARRIER,
]
HOSTS = [
    *((3, ""), (3, "aab"), (2, ""), (4, "abab")),
    *(pytest.param(size, "", marks=pytest.mark.long) for size in (1, 4)),
]


@pytest.mark.parametrize(("size", "hosts"), HOSTS)
def test_any_order_from_any_thread(size, hosts) -> None:
    def work(coordinator):
        choose = random.Random(coordinator.rank)
        for _ in range(3):
            names = [f"n{i}" for i in range(45)]
            choose.shuffle(names)
            results = {}

            def submit(some, results=results):
                works = [
                    (
                        name,
                        coordinator.submit(
                            summed(name, torch.full((7,), int(name[1:])))
                        ),
                    )
                    for name in some
                ]
                for name, each in works:
                    results[name] = each.wait()[0]

            threads = [
                threading.Thread(target=submit, args=(names[i::3],)) for i in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name in names:
                expected = torch.full((7,), int(name[1:]) * coordinator.size)
                torch.testing.assert_close(results[name], expected, rtol=0, atol=0)

    run_coordinated(size, work, hosts=hosts)


@pytest.mark.parametrize("size", ON_ALL)
def test_every_kind(size) -> None:
    def work(coordinator):
        rank, n = coordinator.rank, coordinator.size
        own = torch.arange(2.0 * n).view(n, 2) + rank
        for _ in range(3):  # new, cached, cached
            (total,) = coordinator.run(operation(OpKind.ALLREDUCE, "r", own))
            (gathered,) = coordinator.run(
                operation(OpKind.ALLGATHER, "g", own[: rank + 1])
            )
            (copied,) = coordinator.run(
                operation(OpKind.BROADCAST, "b", own, root=n - 1)
            )
            ((swapped, counts),) = coordinator.run(operation(OpKind.ALLTOALL, "a", own))
            (part,) = coordinator.run(operation(OpKind.REDUCESCATTER, "s", own))
            assert coordinator.run(operation(OpKind.BARRIER, "", own)) is None
            base = torch.arange(2.0 * n).view(n, 2)
            everyone = [base + other for other in range(n)]
            assert torch.equal(total, sum(everyone))
            rows = [each[: other + 1] for other, each in enumerate(everyone)]
            assert torch.equal(gathered, torch.cat(rows))
            assert torch.equal(copied, everyone[-1])
            assert torch.equal(swapped, torch.stack([each[rank] for each in everyone]))
            assert counts == [1] * n
            assert torch.equal(part, sum(everyone)[rank : rank + 1])

    run_coordinated(size, work)


@pytest.mark.parametrize("threshold", [0, 100, 1 << 20])
def test_fused_tensors_keep_their_kinds(threshold) -> None:
    def work(coordinator):
        rank, n = coordinator.rank, coordinator.size
        dtypes = [torch.float32, torch.float64, torch.int32, torch.bfloat16]
        for _ in range(3):
            works = []
            for i in range(24):
                tensor = torch.full((i % 5, 3), rank + i, dtype=dtypes[i % 4]).t()
                op = [ReduceOp.SUM, ReduceOp.MAX][i % 3 == 0]
                works.append(
                    (i, op, coordinator.submit(summed(f"t{i}", tensor, reduce_op=op)))
                )
            for i, op, each in works:
                (result,) = each.wait()
                value = n - 1 + i if op is ReduceOp.MAX else sum(range(n)) + n * i
                assert torch.all(result == torch.tensor(value, dtype=result.dtype))
                assert result.shape == (3, i % 5)

    options = CoordinationOptions(fusion_threshold_bytes=threshold)
    run_coordinated(3, work, options=options)


class Counts(list):
    """Records the number of fused broadcasts."""

    def operation(self, recorded) -> None:
        if recorded.kind == "BROADCAST":
            self.append(recorded.num_fused)

    def cycle(self, at_ns) -> None:
        pass


@pytest.mark.parametrize(
    ("size", "threshold"), all_on_three_ranks([2, 3, 4], [0, 100, 1 << 20])
)
def test_fused_copies_are_of_their_root(size, threshold) -> None:
    dtypes = [torch.float32, torch.bool, torch.int64, torch.float64]

    def values(rank, i):
        whole = torch.arange(3 * (i % 5)).view(i % 5, 3) + rank + i
        return (whole.t() % 3).to(dtypes[i % 4])

    def work(coordinator):
        counts = coordinator.execution.recorder = Counts()
        for _ in range(3):
            under_way = []
            for i in range(24):
                own, root = values(coordinator.rank, i), i % 3 % size
                output = own if i % 2 else torch.empty_like(own)
                copied = operation(OpKind.BROADCAST, f"b{i}", own, root=root)
                copied = copied._replace(outputs=(output,))
                # A sum in between goes its own way.
                total = coordinator.submit(summed(f"r{i}", torch.ones(2)))
                under_way.append((i, root, own, coordinator.submit(copied), total))
            for i, root, own, copied, total in under_way:
                assert torch.equal(copied.wait()[0], values(root, i))
                assert torch.equal(own, values(root if i % 2 else coordinator.rank, i))
                assert total.wait()[0].tolist() == [size, size]
        return counts

    options = CoordinationOptions(fusion_threshold_bytes=threshold)
    for counts in run_coordinated(size, work, options=options):
        assert len(counts) == 72
        assert (max(counts) > 1) is (threshold > 0)


def _odd(kind, **more):
    """Make an operation whose arguments differ on rank 0."""

    def make(rank):
        def choose(value):
            return value[rank > 0] if isinstance(value, tuple) else value

        chosen = {key: choose(value) for key, value in more.items()}
        tensor = torch.ones(
            chosen.pop("shape", [2]), dtype=chosen.pop("dtype", torch.float32)
        )
        return operation(choose(kind), "x", tensor, **chosen)

    return make


def _text(what, did, one, other):
    return f"Mismatched {what}: One rank {did} {one}, but another rank {did} {other}."


SENT = "sent a tensor"
MISMATCHES = {
    _text("data types", "had type", "float32", "int32"): _odd(
        OpKind.ALLREDUCE, dtype=(torch.float32, torch.int32)
    ),
    _text("operations", "did an", "ALLREDUCE", "ADASUM"): _odd(
        (OpKind.ALLREDUCE, OpKind.ADASUM)
    ),
    _text("ALLREDUCE tensor shapes", f"{SENT} of shape", "[2]", "[3]"): _odd(
        OpKind.ALLREDUCE, shape=([2], [3])
    ),
    _text("BROADCAST tensor shapes", f"{SENT} of shape", "[2]", "[2, 1]"): _odd(
        OpKind.BROADCAST, shape=([2], [2, 1])
    ),
    _text(
        "prescale and/or postscale factors", "sent factors", "(1, 1)", "(0.5, 1)"
    ): _odd(OpKind.ALLREDUCE, prescale=(1.0, 0.5)),
    _text("reduction operation", "sent reduction op", 4, 1): _odd(
        OpKind.ALLREDUCE, reduce_op=(ReduceOp.MAX, ReduceOp.SUM)
    ),
    _text("ALLGATHER tensor shapes", f"{SENT} of rank", 2, 3): _odd(
        OpKind.ALLGATHER, shape=([2, 2], [2, 2, 2])
    ),
    _text("ALLTOALL tensor shapes", f"{SENT} with dimension 1 equal to", 3, 4): _odd(
        OpKind.ALLTOALL, shape=([12, 3], [12, 4])
    ),
    "Process-set rank zero tried to ALLGATHER a rank-zero tensor.": _odd(
        OpKind.ALLGATHER, shape=[]
    ),
    _text("BROADCAST root ranks", "specified root rank", 0, 1): _odd(
        OpKind.BROADCAST, root=(0, 1)
    ),
}


@pytest.mark.parametrize("size", ON_THREE[:1] + ON_THREE[2:])
def test_mismatches_fail_on_all_ranks_and_later_calls_work(size) -> None:
    def work(coordinator):
        for text, make in MISMATCHES.items():
            with pytest.raises(CollectiveError) as caught:
                coordinator.run(make(coordinator.rank))
            assert str(caught.value).startswith(text)
            if "Mismatched" in text:
                assert re.search(r"^rank 0: ", str(caught.value), re.MULTILINE)
            (total,) = coordinator.run(summed("x", torch.ones(2)))
            assert total[0] == coordinator.size

    run_coordinated(size, work)


def test_a_pending_name_cannot_be_submitted_again() -> None:
    run_coordinated(2, _twice)


def _twice(coordinator):
    if coordinator.rank == 0:
        first = coordinator.submit(summed("x", torch.ones(2)))
        with pytest.raises(UsageError, match=r"currently being processed\.  If you"):
            coordinator.submit(summed("x", torch.ones(2)))
        coordinator.run(summed("now", torch.ones(1)))
    else:
        coordinator.run(summed("now", torch.ones(1)))
        first = coordinator.submit(summed("x", torch.ones(2)))
    assert first.wait()[0][0] == 2
    assert coordinator.run(summed("x", torch.ones(2)))[0][0] == 2


@pytest.mark.parametrize("size", ON_THREE)
def test_join_gives_zeros_and_one_last_rank(size) -> None:
    def work(coordinator):
        rank, n = coordinator.rank, coordinator.size
        lasts = []
        for cycle in range(2):
            for step in range(rank + 1):
                (total,) = coordinator.run(
                    NamedOperation(
                        OpKind.ALLREDUCE,
                        (torch.ones(3),),
                        "" if cycle else "x",  # unnamed ones are counted anew
                        (torch.ones(3),),
                    )
                )
                assert torch.equal(total, torch.full((3,), float(n - step)))
            lasts.append(coordinator.run(NamedOperation(OpKind.JOIN)))
        return lasts

    assert run_coordinated(size, work) == [[size - 1] * 2] * size


def lose_rank_one(claim, engine, delay_s):
    """Lose it while a coordinator for each kind runs that kind without end.

    Returns what each of them says, and then says to whoever calls again.
    """
    connections = Connections(claim, timeout_s=NEVER_S, engine=engine)
    tensor = torch.ones(300_000, 3)
    with ExitStack() as closing:
        coordinators = {
            kind: closing.enter_context(coordinating(connections, kind.name))
            for kind in MOVING
        }
        for kind, coordinator in coordinators.items():
            for _ in range(3):
                coordinator.run(operation(kind, "x", tensor))
        if claim.rank == 1:
            if delay_s is None:
                os.kill(os.getpid(), signal.SIGKILL)
            killing = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
            killing.start()

        def run_for_ever(kind):
            while True:
                coordinators[kind].run(operation(kind, "x", tensor))

        def hear_of_it(kind):
            with pytest.raises(PeerLostError) as caught:
                run_for_ever(kind)
            with pytest.raises(CollectiveError) as again:
                coordinators[kind].run(operation(kind, "y", tensor))
            return str(caught.value), str(again.value)

        with ThreadPoolExecutor(len(MOVING)) as threads:
            return list(threads.map(hear_of_it, MOVING))


@pytest.mark.parametrize(
    "engine", ["shared_memory", "gloo", pytest.param("auto", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("size", "delay_s"), [(2, None), (3, 0.02)])
def test_a_rank_that_dies_is_named(engine, size, delay_s) -> None:
    """Kill the rank before its first operation, or during operations."""
    told = run_ranks_bare(
        size, lose_rank_one, engine, delay_s, dying=[1], timeout_s=HANG_S
    )
    assert told.pop(1) is None
    for texts in told:
        assert len(texts) == len(MOVING)
        for first, again in texts:
            assert first.startswith("Horovod has been shut down. This was")
            assert re.search(r"[Rr]ank 1\b", first)
            assert re.search(r"[Rr]ank 1\b", again)


def test_a_rank_that_leaves_is_named() -> None:
    """Every call raises a new error, since frames in a traceback keep tensors alive."""

    def work(coordinator):
        coordinator.run(summed("x", torch.ones(2)))
        if coordinator.rank == 1:
            return
        entry = coordinator.submit(summed("y", torch.ones(2)))
        for call in (entry.wait, lambda: coordinator.run(summed("y", torch.ones(2)))):
            frames = []
            for _ in range(100):
                with pytest.raises(PeerLostError, match="Rank 1 has shut down") as told:
                    call()
                frames.append(num_frames(told.value))
            assert max(frames) == frames[0] < 10

    run_coordinated(3, work)


class _Lines(logging.Handler):
    def __init__(self, awaited: str = "") -> None:
        super().__init__()
        self.lines: list[str] = []
        self.awaited = awaited
        self.has_awaited = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self.awaited in self.lines[-1]:
            self.has_awaited.set()


def _listen(awaited=""):
    heard = _Lines(awaited)
    logging.getLogger("ronde").addHandler(heard)
    logging.getLogger("ronde").propagate = False
    return heard


def stall(coordinator, submitted):
    """Rank 0 warns that rank 1 is missing; return each rank's log."""
    heard = _listen("\n1: [allreduce.late]")
    if coordinator.rank == 1:
        own = coordinator.submit(summed("own", torch.ones(2)))
        x = coordinator.submit(summed("x", torch.ones(2)))
        submitted.touch()
        x.wait()  # when rank 0 was warned
        late = coordinator.submit(summed("late", torch.ones(2)))
    else:
        while not submitted.exists():
            time.sleep(0.01)
        late = coordinator.submit(summed("late", torch.ones(2)))
        if coordinator.rank == 0:
            assert heard.has_awaited.wait(HANG_S)
        coordinator.run(summed("x", torch.ones(2)))
        own = coordinator.submit(summed("own", torch.ones(2)))
    assert late.wait()[0][0] == own.wait()[0][0] == 3
    logging.getLogger("ronde").removeHandler(heard)
    return heard.lines


@pytest.mark.waits
@pytest.mark.parametrize(
    "engine",
    [
        *("shared_memory", "gloo", "scheduled", "hierarchical"),
        pytest.param("auto", marks=pytest.mark.long),
    ],
)
def test_a_stall_is_logged(tmp_path, engine) -> None:
    """Run with new names, then again with the cached ones."""

    def work(coordinator):
        return [stall(coordinator, tmp_path / f"submitted {i}") for i in range(2)]

    options = CoordinationOptions(stall_warning_s=0.5)
    told = run_coordinated(3, work, engine=engine, options=options)
    assert told[1] == [[], []]
    for lines in told[0]:
        text = next(text for text in lines if "\n1: [allreduce.late]" in text)
        assert "for more than 0.5 seconds" in text
        assert re.search(
            r"^rank 1: waiting for \[allreduce.own, allreduce.x\]", text, re.MULTILINE
        )


def test_a_stall_can_end_the_job(tmp_path) -> None:
    submitted = tmp_path / "submitted"

    def work(coordinator):
        _listen()
        # Rank 0 is the first, and so the first to have waited too long.
        while coordinator.rank == 1 and not submitted.exists():
            time.sleep(0.01)
        name = "late" if coordinator.rank == 0 else "own"

        def run():
            handle = coordinator.submit(summed(name, torch.ones(2)))
            submitted.touch()
            handle.wait()

        with pytest.raises(CollectiveError) as caught:
            run()
        return str(caught.value)

    options = CoordinationOptions(stall_warning_s=0.3, stall_shutdown_s=0.6)
    for text in run_coordinated(2, work, options=options):
        assert text.startswith("Horovod has been shut down.")
        assert "\n1!: [allreduce.late]" in text
        assert "stalled for longer than 0.6 seconds. Will shutdown." in text


def test_watched_waits_count_as_stalls() -> None:
    def work(coordinator):
        heard = _listen()
        with coordinator.watch("gradients 0") if coordinator.rank else nullcontext():
            if coordinator.rank == 0:
                assert heard.has_awaited.wait(HANG_S)
            coordinator.run(operation(OpKind.BARRIER, "", torch.ones(1)))
        return heard.lines

    options = CoordinationOptions(stall_warning_s=0.5)
    told = run_coordinated(2, work, options=options)
    assert "0: [gradients 0" in told[0][0]


def test_idleness_costs_nothing() -> None:
    def work(coordinator):
        coordinator.run(summed("x", torch.ones(2)))
        return least_when_idle(lambda: threading.Event().wait(1.0))

    # A rank that polled would use a whole core.
    assert max(run_coordinated(3, work, hosts="aab")) < 0.2
