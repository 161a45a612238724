"""One machine as a value: its cores, GPUs and network interfaces, and what is near."""

from dataclasses import dataclass

UNKNOWN_NODE = -1
"""The memory node of what the kernel does not place."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core.

    Attributes:
        cpus: Its hardware threads that this process may use, ascending.
        node: Its memory node, or ``UNKNOWN_NODE``.
    """

    cpus: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number in the order of bus addresses.
        bus_id: As sysfs writes it: ``0000:1b:00.0``.
        node: Its memory node, or ``UNKNOWN_NODE``.
        name: What the driver calls it; empty where it does not tell.
    """

    index: int
    bus_id: str
    node: int
    name: str


@dataclass(frozen=True, slots=True)
class Nic:
    """One network interface or InfiniBand adapter that is up.

    Attributes:
        name: ``eth0``, ``mlx5_0``.
        kind: ``ethernet`` or ``infiniband``.
        bus_id: As sysfs writes it; empty for what is no PCI device.
        node: Its memory node, or ``UNKNOWN_NODE``.
        mbit_per_s: Its rate; 0 where that is not told.
    """

    name: str
    kind: str
    bus_id: str
    node: int
    mbit_per_s: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What ranks on one machine have to share.

    Attributes:
        cores: Those that this process may use, by memory node and number.
        cpu_limit: CPUs that the control groups allow at a time, 0 for no limit.
        gpus: All that the kernel shows, by bus address.
        nics: Those that are up, by name.
    """

    cores: tuple[Core, ...]
    cpu_limit: float
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
