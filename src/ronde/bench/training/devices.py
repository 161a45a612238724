"""Where a rank trains."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ronde.bench.training.options import DeviceKind
from ronde.errors import UsageError
from ronde.records import MachineRecord


def choose_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return this rank's device: of the host's CUDA devices the one of its number.

    Raises:
        UsageError: CUDA was asked for and is not there, or has too few devices.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind is DeviceKind.CPU or (kind is DeviceKind.AUTO and num_devices == 0):
        return torch.device("cpu")
    if num_devices == 0:
        raise UsageError(
            "device must be one that is here, got cuda. Type: --device cpu"
        )
    if local_rank >= num_devices:
        raise UsageError(
            f"ranks of a host must be at most its CUDA devices, {num_devices}, got "
            f"local rank {local_rank}. Type: -n {num_devices}, or --device cpu"
        )
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """Return the model of the processor or accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return MachineRecord.here().cpu


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def used(device: torch.device) -> Generator[None]:
    """Make ``device`` current, and let cuDNN look for its fastest kernels."""
    if device.type != "cuda":
        yield
        return
    was_searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.benchmark = was_searching
