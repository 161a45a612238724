"""What is left of a host while its ranks are placed, one after the other."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE, Core
from ronde.topology.placement.hints import ANY, Hint, counted_hints, filter_hints
from ronde.topology.placement.supply import Device, Supply


class Demand(NamedTuple):
    """What one rank asks for, or several together.

    Attributes:
        gpus: Places of its GPUs in the supply; empty where any will do.
        num_gpus: How many of them.
        num_cores: Physical cores.
        own_cores: Those that it is to have and no others; empty where any will do.
        num_nics: Adapters to be aligned.
        memory_bytes: Memory.
    """

    gpus: tuple[int, ...] = ()
    num_gpus: int = 0
    num_cores: int = 0
    own_cores: tuple[Core, ...] = ()
    num_nics: int = 0
    memory_bytes: int = 0


class Stock:
    """What is left.

    Args:
        supply: All that there is.
        is_nic_shared: Adapters are fewer than wanted, so that nobody has one alone.
    """

    def __init__(self, supply: Supply, *, is_nic_shared: bool) -> None:
        self._supply = supply
        self._is_nic_shared = is_nic_shared
        self._cores = [list(node.cores) for node in supply.nodes]
        self._free_bytes = [node.free_bytes for node in supply.nodes]
        self._free_gpus = list(range(len(supply.gpus)))
        self._sets: dict[int, int] = {}
        self._num_given = [0] * len(supply.nics)

    def hints(self, demand: Demand) -> dict[str, tuple[Hint, ...]]:
        """Return the hints of each resource that is asked for, at least one each."""
        found: dict[str, tuple[Hint, ...]] = {}
        if demand.num_gpus:
            found["gpu"] = self._gpu_hints(demand)
        if demand.num_nics:
            nics = self._supply.nics
            free = [nic for n, nic in enumerate(nics) if self._may_give(n)]
            found["nic"] = self._device_hints(nics, free, demand.num_nics)
        if demand.num_cores:
            total = [len(node.cores) for node in self._supply.nodes]
            found["cpu"] = counted_hints(
                total, self._free_cores(demand), demand.num_cores
            )
        if demand.memory_bytes:
            total = [node.memory_bytes for node in self._supply.nodes]
            found["memory"] = counted_hints(
                total, self._free_bytes, demand.memory_bytes, self._may_hold
            )
        return dict(zip(found, filter_hints([found]), strict=True)) if found else {}

    def free_amounts(self, demand: Demand) -> dict[str, list[int]]:
        """Return how much each node has left of what is counted."""
        free = {"cpu": self._free_cores(demand), "memory": list(self._free_bytes)}
        if not demand.gpus:
            free["gpu"] = self._counts(self._supply.gpus[n] for n in self._free_gpus)
        return free

    def take_gpus(self, demand: Demand, mask: int | None) -> tuple[int, ...]:
        """Give out GPUs, those of the lowest numbers within a set of nodes.

        Args:
            demand: How many, or which.
            mask: Nodes; None for any. Where one of several has enough, all are of one.
        """
        if demand.gpus or not demand.num_gpus:
            return demand.gpus
        best = self._free_gpus
        if mask is not None:
            bits = [self._supply.bit_of(gpu.node) for gpu in self._supply.gpus]
            inside = [n for n in best if self._is_within(self._supply.gpus[n], mask)]
            counts = Counter(bits[n] for n in inside)
            whole = [n for n in inside if counts[bits[n]] >= demand.num_gpus]
            of_one = [n for n in whole if bits[n] == bits[whole[0]]]
            best = list(dict.fromkeys([*of_one, *inside, *best]))
        taken = tuple(sorted(best[: demand.num_gpus]))
        self._free_gpus = [n for n in self._free_gpus if n not in taken]
        return taken

    def take_cores(
        self, demand: Demand, order: Sequence[int], mask: int
    ) -> tuple[Core, ...]:
        """Give out cores, of one node where one has enough.

        Args:
            demand: How many, or which.
            order: Nodes as the rank likes them best, those of the mask first.
            mask: Nodes that are not left while they have enough together.
        """
        if demand.own_cores:
            return demand.own_cores
        wanted = demand.num_cores
        inside = [bit for bit in order if mask >> bit & 1]
        has_room = sum(len(self._cores[bit]) for bit in inside) >= wanted
        tried = inside if has_room else order
        whole = [bit for bit in tried if len(self._cores[bit]) >= wanted]
        taken: list[Core] = []
        for bit in [*whole[:1], *order]:
            num_more = wanted - len(taken)
            taken += self._cores[bit][:num_more]
            del self._cores[bit][:num_more]
        return tuple(sorted(taken, key=lambda core: (core.node, core.cpus)))

    def take_memory(self, wanted: int, mask: int, order: Sequence[int]) -> int:
        """Set memory aside; return the nodes that it is on.

        A set of several nodes serves only who has the same set, so that the kernel
        never has to move one's memory for another's.

        Args:
            wanted: Bytes.
            mask: Nodes it is to come from; more are added where they have too little.
            order: Nodes as the rank likes them best, those of the mask first.
        """
        used = mask
        left = wanted
        for bit in order:
            num_bytes = min(left, self._free_bytes[bit])
            self._free_bytes[bit] -= num_bytes
            left -= num_bytes
            used |= bool(num_bytes) << bit
        for bit in order:
            if used >> bit & 1:
                self._sets[bit] = used
        return used

    def take_nics(self, num_nics: int, gpus: Sequence[int], mask: int) -> list[int]:
        """Give out the best adapters for a rank; none where nothing is known of any.

        Nearest to its first GPU is best, then what was given out least.

        Args:
            num_nics: How many are to come from the mask's nodes; 0 for the nearest one,
                wherever that is.
            gpus: The rank's.
            mask: Nodes.
        """
        near = self._supply.nearness
        own = gpus[0] if gpus else -1
        if num_nics:
            candidates = [n for n in range(len(self._num_given)) if self._may_give(n)]
        else:
            candidates = [n for n in range(len(self._num_given)) if (own, n) in near]

        def badness(nic: int) -> tuple[object, ...]:
            told = near.get((own, nic))
            is_outside = not self._is_within(self._supply.nics[nic], mask)
            order = told.order if told else ()
            is_untold = told is None
            load = self._num_given[nic]
            return (bool(num_nics) and is_outside, is_untold, order, load, nic)

        best = sorted(candidates, key=badness)[: num_nics or 1]
        for nic in best:
            self._num_given[nic] += 1
        return best

    def _is_within(self, device: Device, mask: int) -> bool:
        """Whether a device is near a set of nodes; one that is near none may be."""
        bit = self._supply.bit_of(device.node)
        if bit is None:  # a node without CPUs is in no set
            return device.node == UNKNOWN_NODE
        return bool(mask >> bit & 1)

    def _may_give(self, nic: int) -> bool:
        return self._is_nic_shared or not self._num_given[nic]

    def _may_hold(self, mask: int) -> bool:
        return all(
            self._sets.get(bit, mask) == mask
            for bit in range(mask.bit_length())
            if mask >> bit & 1
        )

    def _free_cores(self, demand: Demand) -> list[int]:
        if not demand.own_cores:
            return [len(cores) for cores in self._cores]
        own = Counter(core.node for core in demand.own_cores)
        return [own[node.number] for node in self._supply.nodes]

    def _gpu_hints(self, demand: Demand) -> tuple[Hint, ...]:
        """Return hints for GPUs; preferred is as few nodes as all of the host allow."""
        gpus = self._supply.gpus
        if not demand.gpus:
            free = [gpus[n] for n in self._free_gpus]
            return self._device_hints(gpus, free, demand.num_gpus)
        own = [gpus[n] for n in demand.gpus]
        if any(gpu.node == UNKNOWN_NODE for gpu in own):
            return ANY
        return counted_hints(self._counts(gpus), self._counts(own), len(own))

    def _device_hints(
        self, all_devices: Iterable[Device], free: Iterable[Device], wanted: int
    ) -> tuple[Hint, ...]:
        """Return hints for devices; nobody knows better where one is not placed."""
        told = list(all_devices)
        if any(device.node == UNKNOWN_NODE for device in told):
            return ANY
        return counted_hints(self._counts(told), self._counts(free), wanted)

    def _counts(self, devices: Iterable[Device]) -> list[int]:
        of_node = Counter(device.node for device in devices)
        return [of_node[node.number] for node in self._supply.nodes]
