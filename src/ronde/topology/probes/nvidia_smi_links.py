"""NVLinks of GPUs from what nvidia-smi says of them, and where they lead."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ronde.topology.graph import NVSWITCH, UNKNOWN, Link, LinkKind
from ronde.topology.pci import bus_order
from ronde.topology.probes.nvidia_models import compute_capability
from ronde.topology.probes.nvidia_smi_gpus import SmiGpu

_MAX_LINKS = 18
"""No GPU has more NVLinks."""


class NvLinks(NamedTuple):
    """NVLinks of all GPUs.

    Attributes:
        links: By GPU.
        remarks: What was odd about them.
    """

    links: tuple[Link, ...]
    remarks: tuple[str, ...]


def find_addresses(gpus: Mapping[int, SmiGpu]) -> dict[int, str]:
    """Return the bus addresses of GPUs, told or following from where links lead.

    Where links lead to as many devices as there are GPUs, and from each to none twice
    counted, these are the GPUs, which nvidia-smi numbers by their addresses.
    """
    told = {number: gpu.bus_id for number, gpu in gpus.items() if gpu.bus_id}
    reached = {bus_id for gpu in gpus.values() for bus_id, _ in gpu.remotes}
    if len(told) == len(gpus) or len(reached) != len(gpus):
        return told
    numbered = dict(zip(sorted(gpus), sorted(reached, key=bus_order), strict=True))
    counts = {
        (number, bus_id): count
        for number, gpu in gpus.items()
        for bus_id, count in gpu.remotes
    }
    are_gpus = all(
        counts.get((a, numbered[b]), 0) == counts.get((b, numbered[a]), 0)
        and (a != b or (a, numbered[a]) not in counts)
        for a in gpus
        for b in gpus
    )
    return {**numbered, **told} if are_gpus else told


def find_links(
    gpus: Mapping[int, SmiGpu],
    names: Mapping[int, str],
    bonds: Mapping[int, Mapping[int, int]],
) -> NvLinks:
    """Return the NVLinks of GPUs, as far as it is told where they lead.

    Args:
        gpus: What is told of each.
        names: Of all GPUs in the graph, by number.
        bonds: How many NVLinks join each GPU to others, where a matrix tells it.
    """
    addresses = find_addresses(gpus)
    known = {bus_id: names[number] for number, bus_id in addresses.items()}
    is_switched = _lead_to_same(gpus, known)
    links: list[Link] = []
    remarks: list[str] = []
    for number, name in names.items():
        gpu = gpus.get(number, SmiGpu())
        if gpu.remotes and is_switched:
            targets = {NVSWITCH: sum(count for _, count in gpu.remotes)}
        elif gpu.remotes:
            targets = {known.get(bus_id, bus_id): n for bus_id, n in gpu.remotes}
        else:
            targets = _bonded(bonds.get(number, {}), gpu, names)
        remarks += _remarks(number, gpu, sum(targets.values()))
        links += [
            Link(LinkKind.NVLINK, name, target, count, _rate(gpu) * count)
            for target, count in targets.items()
        ]
    return NvLinks(tuple(links), tuple(remarks))


def _lead_to_same(gpus: Mapping[int, SmiGpu], known: Mapping[str, str]) -> bool:
    """Return whether all GPUs' links lead to the same devices, which are no GPUs."""
    reached = {frozenset(bus_id for bus_id, _ in gpu.remotes) for gpu in gpus.values()}
    return len(gpus) > 1 and len(reached) == 1 and not next(iter(reached)) & set(known)


def _bonded(
    bonds: Mapping[int, int], gpu: SmiGpu, names: Mapping[int, str]
) -> dict[str, int]:
    """Return where links lead as far as a matrix tells it.

    To several others by all its links, or by more than any GPU has, a GPU gets through
    a switch.
    """
    num_links, most = sum(bonds.values()), max(bonds.values(), default=0)
    if num_links > (most if most == len(gpu.rates) else _MAX_LINKS):
        return {NVSWITCH: most}
    return {names[other]: count for other, count in bonds.items()}


def _rate(gpu: SmiGpu) -> float:
    """Return GB/s of a link where nothing better is known than how fast it signals."""
    if not gpu.rates or compute_capability(gpu.title) != UNKNOWN:
        return 0.0
    return min(gpu.rates)


def _remarks(number: int, gpu: SmiGpu, num_links: int) -> Iterable[str]:
    if gpu.rates and num_links != len(gpu.rates):
        yield (
            f"GPU{number} has {len(gpu.rates)} active NVLinks, and of {num_links} it "
            "is told where they lead."
        )
    if len(set(gpu.rates)) > 1:
        rates = ", ".join(f"{rate:g}" for rate in sorted(set(gpu.rates)))
        yield f"GPU{number} has NVLinks that signal at {rates} GB/s."
    if _rate(gpu) and num_links:
        yield (
            f"GPU{number} is of an unknown model: its NVLinks are counted as fast as "
            "they signal, which is more than they carry."
        )
