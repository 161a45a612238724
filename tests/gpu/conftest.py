import pytest
import torch
from tests.gpu.devices import LIMIT_S, NUM_DEVICES, on_cuda
from tests.ranks import run_ranks


@pytest.fixture(scope="session")
def two_ranks():
    """Skip, in NCCL's words, where no two ranks can meet on this machine's GPUs."""
    if NUM_DEVICES >= 2:
        return
    try:
        sums = run_ranks(2, _sum, connecting=on_cuda("gloo", 2), timeout_s=LIMIT_S)
    except Exception as error:  # noqa: BLE001  whatever it is, it is said
        pytest.skip(f"two ranks cannot share a GPU here: {error}")
    assert sums == [2.0, 2.0]


def _sum(communicator):
    return communicator.all_reduce(torch.ones(1, device="cuda")).wait().item()


@pytest.fixture
def needs_ranks(request):
    """Have ``two_ranks`` looked at by the cases of a test that have several."""

    def need(size: int) -> None:
        if size > 1:
            request.getfixturevalue("two_ranks")

    return need
