"""What lies between GPUs and network adapters: GPUDirect RDMA, and PCI's ACS."""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping

from ronde.check.facts import UnreadableError, Value
from ronde.check.probes.host_virtual import read_is_virtual
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.pci import bus_id, read_link
from ronde.topology.probes.sysfs import Function, read_functions

_MELLANOX = "0x15b3"
_FIRST_DMA_BUF = (5, 12)
_EXTENDED, _SPACE_BYTES = 0x100, 4096
_ACS = 0x0D
_ACS_CONTROL = 6
_REDIRECTING = 0b11101
"""Of the control register: source validation, redirection of requests and completions,
and forwarding upstream."""


def read_direct_rdma(root: str, module: str) -> Value:
    """Return ``adapters``, how many RDMA adapters of NVIDIA's there are, and ``way``.

    The way is how an adapter may reach memory of a GPU: ``nvidia_peermem``,
    ``DMA-BUF``, or empty.

    Args:
        root: Where ``sys`` and ``proc`` are; empty for this machine.
        module: From ``read_module``.
    """
    names = list_names(f"{root}/sys/class/infiniband")
    vendors = [
        read_text(f"{root}/sys/class/infiniband/{name}/device/vendor") for name in names
    ]
    way = ""
    if list_names(f"{root}/sys/module/nvidia_peermem"):
        way = "nvidia_peermem"
    elif "(open)" in module and _kernel(root) >= _FIRST_DMA_BUF:
        way = "DMA-BUF"
    return {"adapters": vendors.count(_MELLANOX), "way": way}


def read_acs(root: str, cards: Iterable[str]) -> list[str]:
    """Return which bridges above cards send traffic between devices up to the host.

    None in virtual machines, which need it.

    Args:
        root: Where ``sys`` and ``proc`` are; empty for this machine.
        cards: Addresses.

    Raises:
        UnreadableError: Not all of a bridge's registers may be read.
    """
    if read_is_virtual(root):
        return []
    functions = read_functions(root)
    chains = (functions[card].chain[1:] for card in cards if card in functions)
    above = dict.fromkeys(bridge for chain in chains for bridge in chain)
    return [bridge for bridge in above if _redirects(root, bridge)]


def read_near_adapters(root: str, cards: Iterable[str]) -> dict[str, list[str]]:
    """Return by card the RDMA adapters that are the fewest bridges away.

    Those that share no bridge with a card are not near: what lies between is the
    processor. Empty where there are no RDMA adapters.

    Args:
        root: Where ``sys`` is; empty for this machine.
        cards: Addresses.
    """
    top = f"{root}/sys/class/infiniband"
    places = {
        name: bus_id(read_link(f"{top}/{name}/device")) for name in list_names(top)
    }
    functions = read_functions(root) if places else {}
    found: dict[str, list[str]] = {}
    for card in cards if places else ():
        ways = {
            name: num_bridges
            for name, place in places.items()
            if (num_bridges := _count_bridges(functions, card, place))
        }
        fewest = min(ways.values(), default=0)
        found[card] = [name for name, number in ways.items() if number == fewest]
    return found


def _count_bridges(functions: Mapping[str, Function], one: str, other: str) -> int:
    """Return how many bridges lie between two devices; 0 if they share none."""
    if one not in functions or other not in functions:
        return 0
    above, others = functions[one].chain[1:], functions[other].chain[1:]
    shared = next((bridge for bridge in above if bridge in others), None)
    return 0 if shared is None else above.index(shared) + others.index(shared) + 1


def _redirects(root: str, bridge: str) -> bool:
    path = f"{root}/sys/bus/pci/devices/{bridge}/config"
    with open(path, "rb") as file:  # noqa: PTH123 - see kernel_files
        config = file.read(_SPACE_BYTES)
    if len(config) <= _EXTENDED:
        raise UnreadableError(
            f"only {len(config)} bytes of {path} can be read; root would help"
        )
    for place in _capabilities(config, _ACS):
        (control,) = struct.unpack_from("<H", config, place + _ACS_CONTROL)
        return bool(control & _REDIRECTING)
    return False


def _capabilities(config: bytes, wanted: int) -> Iterator[int]:
    """Yield where the extended capabilities with a number begin.

    Source: PCI Express Base Specification, "Extended Capabilities List": a word with
    the number in bits 0-15 and the place of the next in bits 20-31.
    """
    place = _EXTENDED
    seen: set[int] = set()
    while _EXTENDED <= place <= len(config) - 8 and place not in seen:
        seen.add(place)
        (word,) = struct.unpack_from("<I", config, place)
        if word & 0xFFFF == wanted:
            yield place
        place = word >> 20 & ~3


def _kernel(root: str) -> tuple[int, ...]:
    release = read_text(f"{root}/proc/sys/kernel/osrelease")
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        raise ValueError(release)
    return int(match[1]), int(match[2])
