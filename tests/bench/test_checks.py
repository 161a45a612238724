"""Verification on real engines: correct results pass, faulty ones fail."""

from itertools import product

import pytest
import torch
from tests.bench.rank_benches import by_shared_memory, options_of, run_rows, sweep_bench

from ronde.bench import (
    COLLECTIVES,
    DTYPES,
    OPS,
    Measured,
    TimingLoop,
    UnsupportedError,
)
from ronde.collectives import ReduceOp, Work


def sweep_all(communicator, dtypes, ops, loop):
    """Run every collective; return its rows' wrong elements, by name."""
    wrong = {}
    for test in COLLECTIVES:
        options = options_of(test, dtypes=dtypes, ops=ops, loop=loop)
        bench = sweep_bench(communicator, options)
        rows = run_rows(bench)
        wrong[test] = [
            side.num_wrong
            for each in rows
            for side in (each.row.out_of_place, each.row.in_place)
        ]
    return wrong


def is_unchecked(test, index):
    return index % 2 == 1 and not COLLECTIVES[test].is_in_place_checked


@pytest.mark.parametrize("size", [1, 3, 4])
def test_all_collectives_are_right(run_ranks, size):
    loop = TimingLoop(iterations=2, warmup=1, unaligned_by=size - 1)
    results = run_ranks(
        size, sweep_all, ("half",), ("sum",), loop, connecting=by_shared_memory
    )
    judge(results, size)


def test_all_collectives_are_right_on_gloo(run_ranks):
    loop = TimingLoop(iterations=1, warmup=0)
    judge(run_ranks(2, sweep_all, ("int8",), ("max",), loop), 2)


def judge(results, size):
    assert results == [results[0]] * size
    for test, wrong in results[0].items():
        expected_rows = 0 if test == "hypercube" and size == 3 else 1
        assert bool(wrong) == bool(expected_rows), test
        for index, count in enumerate(wrong):
            assert count == (None if is_unchecked(test, index) else 0), (test, wrong)


def sweep_reductions(communicator):
    """Run all types and operations of the reducing collectives."""
    with pytest.raises(UnsupportedError):  # asked for by itself
        run_rows(sweep_bench(communicator, options_of("reduce", dtypes=("f8e5m2",))))
    counts = {}
    for test in ("all_reduce", "reduce_scatter", "reduce"):
        options = options_of(test, dtypes=tuple(DTYPES), ops=OPS, sizes=(512, 512))
        events = []
        sweep_bench(communicator, options).run(events.append)
        for event in events:
            if isinstance(event, Measured):
                row = event.row
                counts[test, row.dtype, row.redop, row.root] = (
                    row.out_of_place.num_wrong,
                    row.in_place.num_wrong,
                )
            else:
                counts[test, event.split(":")[1].strip()] = "skipped"
    return counts


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_all_types_and_operations_are_right(run_ranks, size):
    counts = run_ranks(size, sweep_reductions, connecting=by_shared_memory)[0]
    skipped = {key for key, value in counts.items() if value == "skipped"}
    # fp8 is moved and never reduced.
    names = {f"{dtype} {op}" for dtype in ("f8e4m3", "f8e5m2") for op in OPS}
    assert {key[1] for key in skipped} == names
    assert len(counts) - len(skipped) == 10 * len(OPS) * (2 + size)
    assert {counts[key] for key in counts if key not in skipped} == {(0, 0)}


class SpoiltLater:
    """Work of a receive whose result is spoilt."""

    def __init__(self, faulty, tensor, before, work):
        self._faulty, self._tensor = faulty, tensor
        self._before, self._work = before, work

    def wait(self):
        self._work.wait()
        return self._faulty.spoil(self._tensor, self._before)


class Faulty:
    """A real communicator with spoilt results."""

    def __init__(self, inner, fault):
        self._inner, self._fault = inner, fault
        self.engine, self.rank, self.size = inner.engine, inner.rank, inner.size

    def all_reduce(self, tensor, op=ReduceOp.SUM, **factors):
        before = tensor.clone()
        if self._fault == "rank dropped" and self.rank == 1:
            tensor.zero_()
        self._inner.all_reduce(tensor, op, **factors).wait()
        return Work(self.spoil(tensor, before))

    def all_gather(self, tensor, *, out=None):
        before = out.clone()
        self._inner.all_gather(tensor, out=out).wait()
        return Work(self.spoil(out, before))

    def reduce_scatter(self, tensor, op=ReduceOp.SUM, *, out=None, **factors):
        before = out.clone()
        self._inner.reduce_scatter(tensor, op, out=out, **factors).wait()
        return Work(self.spoil(out, before))

    def broadcast(self, tensor, root):
        before = tensor.clone()
        self._inner.broadcast(tensor, root).wait()
        return Work(tensor if self.rank == root else self.spoil(tensor, before))

    def all_to_all(self, tensor, splits=None, *, out=None):
        before = None if out is None else out.clone()
        received, counts = self._inner.all_to_all(tensor, splits, out=out).wait()
        return Work((received if out is None else self.spoil(out, before), counts))

    def send(self, tensor, to, tag=0):
        return self._inner.send(tensor, to, tag)

    def recv(self, tensor, source, tag=0):
        before = tensor.clone()
        work = self._inner.recv(tensor, source, tag)
        return SpoiltLater(self, tensor, before, work)

    def barrier(self):
        return self._inner.barrier()

    def allocate(self, *args):
        return self._inner.allocate(*args)

    def duplicate(self):
        return self._inner.duplicate()

    def close(self):
        self._inner.close()

    def spoil(self, result, before):
        if not result.numel():
            return result
        match self._fault:
            case "not written":
                result.copy_(before)
            case "last not written":
                result[-1] = before[-1]
            case "zeros":
                result.zero_()
            case "rotated":
                result.copy_(result.roll(1))
            case "halves swapped":
                half = result.numel() // 2
                result.copy_(result.roll(half))
            case "one bit":
                result.view(torch.uint8)[0] ^= 1
            case "one rank" if self.rank == self.size - 1:
                result.view(torch.uint8)[0] ^= 128
            case "beyond the end":
                touch_after(result)
        return result


def touch_after(tensor):
    """Change the byte after a tensor that is not the last in its memory."""
    storage = tensor.untyped_storage()
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end < storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage)[end] = 0


FAULTS = (
    "not written",
    "last not written",
    "zeros",
    "rotated",
    "halves swapped",
    "one bit",
    "one rank",
    "beyond the end",
)
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "sendrecv")


def sweep_faulty(communicator, pairs):
    found = {}
    for fault, test in pairs:
        options = options_of(test, sizes=(512, 512))
        rows = run_rows(sweep_bench(Faulty(communicator, fault), options))
        found[fault, test] = [
            (r.row.out_of_place.num_wrong, r.out_of_place.num_failed) for r in rows
        ]
    return found


def test_faults_of_the_engine_are_detected_on_all_ranks(run_ranks):
    pairs = list(product(FAULTS, CALLS))
    results = run_ranks(3, sweep_faulty, pairs, connecting=by_shared_memory)
    assert results == [results[0]] * 3
    for pair, rows in results[0].items():
        assert all(wrong > 0 and failed == 1 for wrong, failed in rows), pair


def test_faults_of_two_ranks_are_detected(run_ranks):
    """Only the root checks ``gather`` and ``reduce``."""
    rooted = ("broadcast", "gather", "scatter", "reduce")
    dropped = ("rank dropped", "all_reduce")
    pairs = [*product(["last not written"], rooted), dropped]
    found = run_ranks(2, sweep_faulty, pairs, connecting=by_shared_memory)[0]
    assert found.pop(dropped) == [(2 * 128, 1)]
    for pair, rows in found.items():
        assert all(wrong > 0 for wrong, _ in rows), pair
