"""Computing on hosts: a product that is exact, and how fast they are."""

import hashlib
import json
import os
import random
import subprocess
import sys
from contextlib import ExitStack

import pytest
from hypothesis import given, settings, strategies as st
from tests.check.copies_suite import check_copies
from tests.check.programs import run_step, start_hosts

from ronde.check import (
    COPIES,
    MAX_SIZE,
    NUM_IN_ROUND,
    PACE,
    PRODUCTS,
    NodeContext,
    burn_host,
    make_factor,
    multiply,
    sum_up,
)

torch = pytest.importorskip("torch")


@pytest.fixture
def context():
    with ExitStack() as closing:
        yield NodeContext({}, closing)


def exact_checksum(size, seed):
    """Multiply with whole numbers of any size, from the seeds up."""
    factors: list[list[list[int]]] = []
    for number in range(2):
        data = random.Random(seed + number).randbytes(4 * size * size)
        numbers = [
            int.from_bytes(data[at : at + 4], sys.byteorder, signed=True) >> 11
            for at in range(0, len(data), 4)
        ]
        factors.append([numbers[at : at + size] for at in range(0, len(numbers), size)])
    left, right = factors
    columns = list(zip(*right, strict=True))
    product = [
        sum(a * b for a, b in zip(row, column, strict=True))
        for row in left
        for column in columns
    ]
    data = b"".join(value.to_bytes(8, sys.byteorder, signed=True) for value in product)
    return hashlib.sha256(data).hexdigest()[:16]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(0, 1 << 32))
def test_any_product_is_exact(size, seed):
    factors = [make_factor(torch, size, seed + number) for number in range(2)]
    assert sum_up(torch, factors[0] @ factors[1]) == exact_checksum(size, seed)


def test_the_largest_factors_stay_exact():
    # The bound of the note, reached: 2^13 products of 2^20 and 2^20 make 2^53, and
    # from there on float64 cannot hold one more.
    row = torch.full((1, MAX_SIZE), -(2.0**20), dtype=torch.float64)
    assert (row @ row.T).item() == 2**53
    assert float(2**53 + 1) == 2**53
    factor = make_factor(torch, 300, 1)
    assert factor.min().item() >= -(2**20)
    assert factor.max().item() < 2**20
    assert factor.abs().max().item() > 0.99 * 2**20


class Glitch:
    """A matrix whose second product is off by one."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.num_products = matrix, matrix.shape, 0

    def to(self, _device):
        return self

    def __matmul__(self, other):
        self.num_products += 1
        product = self.matrix @ other
        return product + 1 if self.num_products == 2 else product


def test_a_product_that_differs_from_the_first_is_counted():
    factors = [make_factor(torch, 8, number) for number in (1, 2)]
    reported = multiply(torch, "cpu", [Glitch(factors[0]), factors[1]], 0.05)
    assert reported["num_products"] > 1
    assert reported["num_wrong"] == 1


@pytest.fixture
def run_first(monkeypatch, tmp_path):
    """Give a function from a text to programs that begin with it."""

    def run(text):
        (tmp_path / "sitecustomize.py").write_text(text)
        paths = (str(tmp_path), *filter(None, sys.path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return run


QUESTION = {"do": "burn_host", "seconds": 0.01, "size": 8, "seed": 5}


def test_a_crash_is_reported_and_missing_torch_is_unreadable(context, run_first):
    reported = burn_host(context, QUESTION | {"size": MAX_SIZE + 1})["products"]
    (failed,) = reported.values()
    assert "ended with code 1" in failed["failure"]
    assert f"got {MAX_SIZE + 1}" in failed["failure"]
    run_first("import sys; sys.modules['torch'] = None")
    with pytest.raises(OSError, match="torch cannot be imported"):
        burn_host(context, QUESTION)


COMPUTED = {"checksum": "c0ffee", "num_wrong": 0, "model": "M"}
TWO_GPUS = """
import sys
if "ronde.check" in " ".join(sys.orig_argv):
    import torch
    from tests.check.cuda_fake import FakeTorch, on_host
    torch.Tensor.to = on_host(torch.Tensor.to)
    sys.modules["torch"] = fake = FakeTorch((0, 0x1B, 0), (0, 0x1C, 0))
"""


def test_products_are_exact_and_each_gpu_copies(context, run_first):
    """Its GPUs are this machine's memory; see ``cuda_fake``."""
    run_first(TWO_GPUS)
    reported = burn_host(context, QUESTION | {"size": 33})
    products = reported["products"]
    assert products.keys() == {"cpu", "cuda:0", "cuda:1"}
    for each in products.values():
        assert each["checksum"] == exact_checksum(33, 5)
        assert each["num_wrong"] == 0
        assert each["num_products"] >= 1
        assert each["gflop_per_s"] > 0
    assert reported["copies"].keys() == {"cuda:0", "cuda:1"}
    for name, copies in reported["copies"].items():
        check_copies(copies)
        assert copies["model"] == products[name]["model"]
        assert products[name]["num_products"] % NUM_IN_ROUND == 0


def test_crashed_copies_leave_the_products(context, run_first):
    # The first that copies ask for, and products do not.
    first = "fake.cuda.get_device_properties = lambda _: os.kill(os.getpid(), 11)"
    run_first(f"{TWO_GPUS}    import os\n    {first}\n")
    reported = burn_host(context, QUESTION)
    assert all("checksum" in each for each in reported["products"].values())
    assert reported["copies"].keys() == {"cuda:0", "cuda:1"}
    for each in reported["copies"].values():
        assert each["failure"].startswith("its program failed: it ended with code -11")


def burn_answering(answer, num_gpus=None):
    """Return the facts of a host whose program gives this answer."""
    program = f"while input(): print({json.dumps(answer)!r}, flush=True)"

    def start(_name, **popen):
        return subprocess.Popen([sys.executable, "-c", program], **popen)

    with start_hosts({"a": ""}, {"burn_s": 0.01}, start=start) as hosts:
        if num_gpus is not None:
            hosts.note("a", "gpu.count", num_gpus)
        run_step("burning", hosts)
    return hosts.facts["a"]


FAILED = {"failure": "out of memory"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"products": {"cpu": COMPUTED}}, "torch sees no GPU there"),
        ({"products": {"all processors": FAILED}}, "out of memory"),
        ({"error": "OSError: torch cannot be imported"}, "torch cannot be imported"),
    ],
)
def test_copies_of_an_unused_gpu_are_unreadable(answer, reason):
    facts = burn_answering(answer, num_gpus=2)
    assert COPIES not in facts.values
    assert reason in facts.unreadable[COPIES]


def test_a_lost_host_is_unreadable():
    def start(_name, **popen):
        return subprocess.Popen([sys.executable, "-c", "input()"], **popen)

    with start_hosts({"a": ""}, {"burn_s": 0.01}, start=start) as hosts:
        run_step("pace", hosts)
        run_step("burning", hosts)
    assert hosts.facts["a"].values == {}
    assert hosts.facts["a"].unreadable.keys() == {PACE, PRODUCTS}
