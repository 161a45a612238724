"""One machine as a value: its cores, GPUs and network interfaces, and what is near."""

from typing import NamedTuple

UNKNOWN_NODE = -1
"""The memory node of what the kernel does not place."""


class Core(NamedTuple):
    """One physical core.

    Attributes:
        cpus: Its hardware threads that this process may use, ascending.
        node: Its memory node, or ``UNKNOWN_NODE``.
    """

    cpus: tuple[int, ...]
    node: int


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        number: Its place in the order of bus addresses, whatever is hidden.
        bus_id: As sysfs writes it: ``0000:1b:00.0``; empty where it is not known.
        node: Its memory node, or ``UNKNOWN_NODE``.
        name: What the driver calls it; empty where it does not tell.
        maker: ``nvidia``, ``amd`` or ``intel``.
        uuid: ``GPU-...``; empty where the driver does not tell.
        path: Its place on the bus: host bridge, bridges and itself, as sysfs has them.
        visible_as: What names it in ``CUDA_VISIBLE_DEVICES`` and the like.
    """

    number: int
    bus_id: str
    node: int
    name: str
    maker: str
    uuid: str
    path: str
    visible_as: str


class Nic(NamedTuple):
    """One network interface or RDMA adapter that is up.

    Attributes:
        name: ``eth0``, ``mlx5_0``.
        kind: ``ethernet`` for what has sockets, ``infiniband`` for an RDMA adapter.
        bus_id: As sysfs writes it; empty for what is no PCI device.
        node: Its memory node, or ``UNKNOWN_NODE``.
        mbit_per_s: Its rate; 0 where that is not told.
        path: Its place on the bus, like a GPU's; empty for what is no PCI device.
    """

    name: str
    kind: str
    bus_id: str
    node: int
    mbit_per_s: int
    path: str


class NearPort(NamedTuple):
    """How near a port to train over is to a GPU.

    Attributes:
        gpu: The GPU's address, as sysfs writes it.
        port: Its name: ``mlx5_0``.
        order: Smaller is nearer; of equals, none is better.
    """

    gpu: str
    port: str
    order: tuple[float, ...]


class Machine(NamedTuple):
    """What ranks on one machine have to share.

    Attributes:
        cores: Those that this process may use, by memory node and number.
        cpu_limit: CPUs that the control groups allow at a time, 0 for no limit.
        gpus: Those that a program of this process would see, in its order; all of one
            maker.
        nics: Those that are up, by name.
        near: What is known of these GPUs and the ports to train over, port by port.
    """

    cores: tuple[Core, ...]
    cpu_limit: float
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    near: tuple[NearPort, ...] = ()
