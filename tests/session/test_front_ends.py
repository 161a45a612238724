"""The session carries any front end: here one over NumPy, and it loads none itself."""

import ast
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tests.ranks import run_ranks_bare

from ronde import numpy as npd

ROOT = Path(__file__).parents[2]
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
FRESH = """
import sys
import ronde.session
from tests.session.test_front_ends import check_all
check_all()
others = {"horovod", "jax", "keras", "tensorflow", "torch"}
sys.exit(" ".join({f"ronde.{name}" for name in others} & sys.modules.keys()) or None)
"""
_MUTABLE = {"list", "dict", "set", "deque", "defaultdict", "count", "WeakSet"}
_MUTABLE |= {"WeakKeyDictionary", "WeakValueDictionary", "ContextVar", "local"}


def array_of(rank: int) -> np.ndarray:
    return np.arange(6, dtype=np.float64).reshape(3, 2) * (rank + 1)


def rows_of(rank: int) -> np.ndarray:
    return np.full((rank + 1, 2), rank, np.int32)


def check_collectives() -> None:
    """Start all by name, in this rank's own order, and end them in another."""
    rank, size = npd.rank(), npd.size()
    ranks = range(size)
    arrays, own = [array_of(r) for r in ranks], array_of(rank)
    total = np.sum(arrays, axis=0)
    splits = [(rank + to) % 3 for to in ranks]
    sent = np.repeat(np.arange(size) * 10 + rank, splits)
    counts = [(r + rank) % 3 for r in ranks]
    scattered = np.stack([own] * size).reshape(-1, 2)[: 3 * size - 1]
    whole = np.stack([total] * size).reshape(-1, 2)[: 3 * size - 1]
    cases: dict[str, tuple[Callable[[str], int], object]] = {
        "sum": (lambda n: npd.allreduce_async(own, n, npd.Sum), total),
        "average": (lambda n: npd.allreduce_async(own, n), total / size),
        "min": (lambda n: npd.allreduce_async(own, n, npd.Min), arrays[0]),
        "max": (lambda n: npd.allreduce_async(own, n, npd.Max), arrays[-1]),
        "group": (
            lambda n: npd.grouped_allreduce_async([own, own[0]], n, npd.Sum),
            (total, total[0]),
        ),
        "ragged": (
            lambda n: npd.allgather_async(rows_of(rank), n),
            np.concatenate([rows_of(r) for r in ranks]),
        ),
        "last": (lambda n: npd.broadcast_async(own, size - 1, n), arrays[-1]),
        "splits": (
            lambda n: npd.alltoall_async(sent, splits, n),
            (np.repeat(rank * 10 + np.arange(size), counts), np.array(counts)),
        ),
        "rows": (
            lambda n: npd.reducescatter_async(scattered, n, npd.Sum),
            np.array_split(whole, size)[rank],
        ),
    }
    names = list(cases)
    random.Random(rank).shuffle(names)
    handles = {name: cases[name][0](name) for name in names}
    for name in reversed(names):
        npd.poll(handles[name])
        for found, expected in zip(
            listed(npd.synchronize(handles[name])), listed(cases[name][1]), strict=True
        ):
            assert_array_equal(found, expected, err_msg=name)
    assert npd.synchronize(handles["sum"]) is None
    assert_array_equal(own, array_of(rank))


def listed(result: object) -> tuple[object, ...]:
    return result if isinstance(result, tuple) else (result,)


def check_waiting() -> None:
    """Check the calls that every rank makes in one order."""
    rank, size = npd.rank(), npd.size()
    for _ in range(3):  # negotiated, by its number, on the fast path
        found = npd.allreduce(array_of(rank), "again", npd.Max)
        assert_array_equal(found, array_of(size - 1))
    received = array_of(rank)
    npd.broadcast_(received, size - 1, "into")
    assert_array_equal(received, array_of(size - 1))
    npd.barrier()
    assert npd.broadcast_object({"from": rank}, size - 1) == {"from": size - 1}
    assert npd.allgather_object(rank, "ranks") == list(range(size))
    for number in range(rank):  # the ranks before have joined: zeros are theirs
        found = npd.allreduce(np.ones(2), f"longer {number}", npd.Sum)
        assert_array_equal(found, np.full(2, size - 1 - number))
    assert npd.join() == size - 1


def check_sets() -> None:
    """Check a set of all ranks but the last, on whose call the others do not wait."""
    some = npd.add_process_set(range(npd.size() - 1))
    if some.included():
        found = npd.allreduce(np.ones(3), "of some", npd.Sum, process_set=some)
        assert_array_equal(found, np.full(3, some.size()))
    assert npd.remove_process_set(some)


def check_mixed() -> None:
    """Reduce one name by ``ronde.torch`` on the first rank, by NumPy on the others."""
    import torch

    import ronde.torch as hvd

    assert (hvd.rank(), hvd.size()) == (npd.rank(), npd.size())
    ones = np.ones(4, np.float32)
    if npd.rank():
        found = npd.allreduce(ones, "mixed", npd.Sum)
    else:
        found = hvd.allreduce(torch.ones(4), name="mixed", op=hvd.Sum).numpy()
    assert_array_equal(found, ones * npd.size())


def check_all() -> None:
    npd.init()
    check_collectives()
    check_waiting()
    if npd.size() > 1:
        check_sets()
        check_mixed()
    npd.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_a_front_end_over_numpy_makes_all_collectives(size):
    run_ranks_bare(size, lambda _: check_all(), environment=DYNAMIC)


def test_a_session_loads_no_front_end():
    done = subprocess.run(
        [sys.executable, "-c", FRESH],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_front_end_of_torch_keeps_no_state():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "src/ronde/torch").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and begins_empty(node.value)
    ]
    assert not found, "session state belongs to ronde.session"


def begins_empty(value: ast.expr | None) -> bool:
    """Return whether a name of a module is bound to a table that is to be filled."""
    match value:
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(func=func):
            function = func.value if isinstance(func, ast.Subscript) else func
            return ast.unparse(function).rpartition(".")[2] in _MUTABLE
    return False
