"""Where a GPU sits, and its PCI link while it copies: idle GPUs lower theirs."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ronde.check.facts import UnreadableError, Value
from ronde.check.nvml.driver import NvmlDriver
from ronde.check.nvml.questions import (
    NOT_SUPPORTED,
    GpuQuestion,
    HostQuestion,
    Nvml,
    RefusedError,
)
from ronde.topology.cpu_sets import members
from ronde.topology.kernel_files import read_list
from ronde.topology.pci import plain_address
from ronde.topology.probes.nvml import NoNvmlError, open_nvml


def address_of(properties: Any) -> str:  # noqa: ANN401  torch's, without types
    """Return where a GPU of CUDA's sits, as sysfs spells it; empty if it is not told.

    CUDA's numbers follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's neither:
    the address is what both know of a GPU.

    Args:
        properties: What ``torch.cuda.get_device_properties`` returns.
    """
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        device = properties.pci_device_id
    except AttributeError:
        return ""
    return plain_address(f"{domain:x}:{bus:x}:{device:x}.0")


def find_gpu(nvml: Nvml, address: str) -> int:
    """Return NVML's number of the GPU at an address.

    Raises:
        RefusedError: NVML does not say how many GPUs there are.
        UnreadableError: None is known to be there.
    """
    if not address:
        raise UnreadableError("torch does not tell its PCI address; newer ones do")
    refused = ""
    for number in range(nvml.ask_host(HostQuestion.NUM_GPUS)):
        try:
            if nvml.ask_gpu(GpuQuestion.BUS_ID, number) == address:
                return number
        except RefusedError as error:
            refused = f", and of GPU {number} not where it is: {error}"
    raise UnreadableError(f"NVML tells of no GPU at {address}{refused}")


def watch(ask: Callable[[], Value], is_busy: Callable[[], bool]) -> Value:
    """Return a link at its best while copies ran.

    What is answered after the last copy has ended does not count.

    Args:
        ask: Returns ``GpuQuestion.PCIE``'s answer.
        is_busy: Whether copies run.

    Raises:
        RefusedError: The question is not answered.
        UnreadableError: All copies had ended before the first answer.
    """
    best: dict[str, int] = {}
    while is_busy():
        link = ask()
        if is_busy():
            best = {name: max(now, best.get(name, 0)) for name, now in link.items()}
    if not best:
        raise UnreadableError("its copies had ended before NVML answered")
    return best


def read_under_load(address: str, load: Callable[[], Callable[[], bool]]) -> Value:
    """Return the link of a GPU while it copies, in the form of ``GpuQuestion.PCIE``.

    Args:
        address: Where the GPU is.
        load: Begins to copy, and returns what tells whether the copies still run.

    Returns:
        Nothing for a GPU of which NVML tells no link at all, such as a virtual one.

    Raises:
        UnreadableError: It could not be told.
    """
    try:
        with open_nvml() as module:
            nvml = NvmlDriver(module)
            number = find_gpu(nvml, address)
            return watch(lambda: nvml.ask_gpu(GpuQuestion.PCIE, number), load())
    except NoNvmlError as error:
        raise UnreadableError(str(error)) from error
    except RefusedError as error:
        if error.code == NOT_SUPPORTED:
            return None
        raise UnreadableError(str(error)) from error


@contextmanager
def staying_near(address: str, root: str = "") -> Generator[bool]:
    """Keep this thread on the CPUs next to a GPU: memory that it takes lies there too.

    It gives whether that could be done: not where the address is unknown, or no CPU
    may be chosen, as in some containers.

    Args:
        address: Where the GPU is; may be empty.
        root: Where ``sys`` is; empty for this machine.
    """
    allowed = os.sched_getaffinity(0)
    path = f"{root}/sys/bus/pci/devices/{address}/local_cpulist"
    near = allowed.intersection(members(read_list(path)))
    is_near = bool(near) and _move_to(near)
    try:
        yield is_near
    finally:
        if is_near:
            os.sched_setaffinity(0, allowed)


def _move_to(cpus: set[int]) -> bool:
    try:
        os.sched_setaffinity(0, cpus)
    except PermissionError:
        return False
    return True
