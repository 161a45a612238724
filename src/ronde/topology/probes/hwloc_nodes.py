"""NUMA nodes from hwloc's XML: their CPUs, cores, memory and processors."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ronde.topology.cpu_sets import members
from ronde.topology.graph import UNKNOWN, NumaNode
from ronde.topology.probes.hwloc_objects import MAX_CPUS, PACKAGES, HwlocObject
from ronde.topology.probes.refusals import bad_value

_ARCHS = {"aarch64": "arm64", "ppc64le": "ppc64"}
_ORDINARY_MEMORY = ("", "DRAM")


class Nodes:
    """The NUMA nodes of a machine.

    A CPU is in one of them: where nodes have the same CPUs, as memory of two sorts in
    one package has, those belong to ordinary memory, and there to the lowest number.

    Args:
        objects: All of the machine.
        infos: What is told of the whole machine.

    Raises:
        UsageError: Two have the same number, or one has none.
    """

    def __init__(
        self, objects: Sequence[HwlocObject], infos: Mapping[str, str]
    ) -> None:
        self._infos = infos
        self._threads = _threads(objects)
        self._own: dict[int, int] = {}
        self._owner: dict[int, int] = {}
        told = _numbered([each for each in objects if each.kind == "NUMANode"])
        # Before version 2 a machine with one node has none.
        told = told or {0: objects[0]}
        self._share(told)
        cores = self._cores(objects)
        self._packages = _packages(objects)
        self._nodes = {
            number: self._node(number, each, tuple(cores[number]))
            for number, each in sorted(told.items())
        }

    def with_distances(
        self, distances: Mapping[int, tuple[tuple[int, int], ...]]
    ) -> tuple[NumaNode, ...]:
        """Return the nodes by number, with the distances of those that have some."""
        return tuple(
            node._replace(distances=distances.get(number, ()))
            for number, node in self._nodes.items()
        )

    def near(self, cpus: int) -> int:
        """Return the node that has all of some CPUs; ``UNKNOWN`` if none has."""
        first = (cpus & -cpus).bit_length() - 1
        number = self._owner.get(first, UNKNOWN)
        return number if cpus & ~self._own.get(number, 0) == 0 else UNKNOWN

    def _share(self, told: Mapping[int, HwlocObject]) -> None:
        """Give each CPU to one node."""
        taken = 0
        for number, each in sorted(told.items(), key=_precedence):
            cpus = each.cpus & self._threads if self._threads else each.cpus
            self._own[number] = cpus & ~taken
            taken |= cpus
            for cpu in members(self._own[number]):
                self._owner[cpu] = number

    def _cores(
        self, objects: Sequence[HwlocObject]
    ) -> dict[int, list[tuple[int, ...]]]:
        """Return the threads of each core by node."""
        found: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for each in objects:
            threads = each.cpus & self._threads
            if each.kind == "Core" and threads:
                number = self.near(threads)
                found[number].append(tuple(members(threads)))
        return found

    def _node(
        self, number: int, each: HwlocObject, cores: tuple[tuple[int, ...], ...]
    ) -> NumaNode:
        cpus = members(self._own[number])
        around = self._package(cpus) if cpus else each.package
        infos = {**self._infos, **(around.infos() if around else {})}
        arch = infos.get("Architecture", "")
        return NumaNode(
            number=number,
            cpus=tuple(cpus),
            cores=tuple(sorted(cores)),
            memory_bytes=each.number("local_memory"),
            package=around.number("os_index") if around else UNKNOWN,
            arch=_ARCHS.get(arch, arch),
            vendor=infos.get("CPUVendor", ""),
            family=_family(infos.get("CPUFamilyNumber", "")),
            model=_small_number(infos.get("CPUModelNumber", "")),
        )

    def _package(self, cpus: Sequence[int]) -> HwlocObject | None:
        """Return the package of CPUs; none where they are of several."""
        around = {id(each): each for cpu in cpus if (each := self._packages.get(cpu))}
        return next(iter(around.values())) if len(around) == 1 else None


def _packages(objects: Sequence[HwlocObject]) -> dict[int, HwlocObject]:
    """Return the package of each CPU."""
    found: dict[int, HwlocObject] = {}
    taken = 0
    for each in objects:
        if each.kind in PACKAGES:
            found |= dict.fromkeys(members(each.cpus & ~taken), each)
            taken |= each.cpus
    return found


def _threads(objects: Sequence[HwlocObject]) -> int:
    """Return the hardware threads that are there."""
    found: set[int] = set()
    for each in objects:
        if each.kind == "PU":
            number = each.number("os_index")
            if not 0 <= number < MAX_CPUS:
                raise bad_value(
                    each.origin,
                    each.element.line,
                    f"a PU's os_index must be from 0 to {MAX_CPUS - 1}",
                    each.text("os_index"),
                )
            found.add(number)
    return sum(1 << number for number in found)


def _numbered(nodes: Sequence[HwlocObject]) -> dict[int, HwlocObject]:
    found: dict[int, HwlocObject] = {}
    for each in nodes:
        number = each.number("os_index")
        if number in found or number == UNKNOWN:
            raise bad_value(
                each.origin,
                each.element.line,
                "a NUMANode must have an os_index of its own",
                each.text("os_index"),
            )
        found[number] = each
    return found


def _precedence(told: tuple[int, HwlocObject]) -> tuple[bool, int, int]:
    number, each = told
    is_special = each.text("subtype") not in _ORDINARY_MEMORY
    return is_special, each.cpus.bit_count(), number


def _family(text: str) -> int:
    """Return a processor's family as NCCL counts it.

    The processor tells a base of 15 and what goes beyond it apart; NCCL adds 16 times
    the second, hwloc and the kernel add it once.
    """
    family = _small_number(text)
    return 15 + 16 * (family - 15) if family > 15 else family


def _small_number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else UNKNOWN
