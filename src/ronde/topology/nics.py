"""The network interfaces and RDMA adapters that are up."""

from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.machine import Nic
from ronde.topology.pci import bus_id, read_node, read_path

_LOOPBACK = "772"


def read_nics(root: str) -> tuple[Nic, ...]:
    """Return them by name, without loopback and what only serves a container.

    Args:
        root: Where ``sys`` is; empty for this machine.
    """
    nics = _interfaces(root) + _adapters(root)
    return tuple(sorted(nics, key=lambda nic: nic.name))


def parse_rate(rate: str) -> int:
    """Return the Mbit/s of ``400 Gb/sec (4X NDR)``; 0 where that is not told."""
    try:
        return int(float(rate.split(maxsplit=1)[0]) * 1000)
    except (ValueError, IndexError, OverflowError):
        return 0


def _interfaces(root: str) -> list[Nic]:
    found: list[Nic] = []
    directory = f"{root}/sys/class/net"
    for name in list_names(directory):
        own = f"{directory}/{name}"
        # Of one that is down the kernel refuses to tell the carrier.
        if read_text(f"{own}/carrier") != "1":
            continue
        path = read_path(own)
        is_far_end = not path and bool(list_names(f"{own}/brport"))
        if not is_far_end and read_text(f"{own}/type") != _LOOPBACK:
            rate = max(0, read_number(f"{own}/speed", 0))
            found.append(_nic(root, name, "ethernet", path, rate))
    return found


def _adapters(root: str) -> list[Nic]:
    found: list[Nic] = []
    directory = f"{root}/sys/class/infiniband"
    for name in list_names(directory):
        own = f"{directory}/{name}/ports"
        rates = [
            parse_rate(read_text(f"{own}/{port}/rate"))
            for port in list_names(own)
            if read_text(f"{own}/{port}/state").startswith("4:")
        ]
        if rates:
            path = read_path(f"{directory}/{name}")
            found.append(_nic(root, name, "infiniband", path, max(rates)))
    return found


def _nic(root: str, name: str, kind: str, path: str, mbit_per_s: int) -> Nic:
    return Nic(name, kind, bus_id(path), read_node(root, path), mbit_per_s, path)
