"""A fake torch whose GPUs use this machine's memory; it has only a few functions."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from tests.check.nvml_fake import H100

PINNING_REFUSED = 999


class FakeRuntime:
    """CUDA's runtime; records the pinned memory."""

    def __init__(self, *, pins):
        self.pins = pins
        self.pinned = {}

    def cudaHostRegister(self, pointer, size, flags):  # noqa: N802  its name
        if not self.pins:
            return PINNING_REFUSED
        assert flags == 0
        self.pinned[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer):  # noqa: N802  its name
        del self.pinned[pointer]
        return 0


def on_host(move):
    """Return ``torch.Tensor.to`` for GPUs that are this machine's memory."""

    def to(tensor, where):
        return tensor if str(where).startswith("cuda:") else move(tensor, where)

    return to


def _shrunk(size):
    is_large = isinstance(size, int) and size > 1 << 20
    return size >> 10 if is_large else size


class FakeTorch:
    """The part of torch that ``--burn`` uses on GPUs; the rest is torch itself.

    Args:
        addresses: Of its GPUs, domain, bus and device each.
        pins: Whether memory of the host can be pinned.
        memory_bytes: No tensor on a GPU is larger.

    A tensor of many bytes is made with few: copies of it take no time.
    """

    def __init__(self, *addresses, pins=True, memory_bytes=1 << 40):
        self.addresses = addresses
        self.memory_bytes = memory_bytes
        self.runtime = FakeRuntime(pins=pins)
        self.cuda = SimpleNamespace(
            device_count=lambda: len(self.addresses),
            get_device_name=lambda _: H100["titles"],
            get_device_properties=self._properties,
            device=self._device,
            synchronize=lambda: None,
            empty_cache=lambda: None,
            cudart=lambda: self.runtime,
        )

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, size, *, dtype, device="cpu"):
        if device != "cpu":
            assert device.startswith("cuda")
            if (
                math.prod(size if isinstance(size, tuple) else (size,))
                > self.memory_bytes
            ):
                raise RuntimeError("CUDA out of memory.\nTry something else.")
        return torch.zeros(_shrunk(size), dtype=dtype)

    def empty(self, size, *, dtype):
        return torch.empty(_shrunk(size), dtype=dtype)

    def _properties(self, number):
        domain, bus, device = self.addresses[number]
        return SimpleNamespace(
            pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device
        )

    @contextmanager
    def _device(self, number):
        assert number in range(len(self.addresses))
        yield
