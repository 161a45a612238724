"""A GPU for every rank: of its own where there are enough, else one that all share."""

import os
from dataclasses import dataclass

import pytest
import torch
from tests.conformance.engines import Setting

HAS_CUDA = torch.cuda.is_available()
NUM_DEVICES = torch.cuda.device_count() if HAS_CUDA else 0
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_CUDA, reason="torch sees no CUDA device here"),
    # The first NCCL communicator of a process takes seconds.
    pytest.mark.timeout(170),
]
LIMIT_S = 60.0
"""For the ranks of one test."""
NCCL_WAITS_S = 20.0


def take_device(claim) -> None:
    """Give a rank its device, before NCCL is asked for anything.

    NCCL refuses a GPU that two ranks of one host have. Shown as ranks of several hosts,
    they reach each other over sockets.
    """
    is_shared = claim.local_size > NUM_DEVICES
    if is_shared:
        names = {"NCCL_HOSTID": f"ronde-{claim.rank}", "NCCL_P2P_DISABLE": "1"}
        os.environ.update(names)  # noqa: TID251  NCCL reads it
    torch.cuda.set_device(0 if is_shared else claim.local_rank)


@dataclass(frozen=True)
class OnCuda:
    """Connects by an engine, on a rank's own device or the one that all share."""

    setting: Setting

    def __str__(self) -> str:
        return str(self.setting)

    @property
    def size(self) -> int:
        return self.setting.size

    def __call__(self, claim):
        take_device(claim)
        return self.setting(claim)


def on_cuda(engine: str, size: int) -> OnCuda:
    return OnCuda(Setting(engine, size, timeout_s=NCCL_WAITS_S))


def on_its_device(claim, fn, *args):
    """Call ``fn(claim, *args)`` on the rank's device, for ``run_ranks_bare``."""
    take_device(claim)
    return fn(claim, *args)
