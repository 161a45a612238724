"""Places the ranks of one host: its GPU, an even part of the cores, an adapter."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine
from ronde.topology.placement.policies import (
    ANY,
    NOWHERE,
    Alignment,
    Hint,
    NodeSet,
    Policy,
    counted_hints,
    decide,
)

# Memory nodes with cores of a host: every set of them is tried.
_MAX_NODES = 16


class InventoryNode(NamedTuple):
    """A memory node with cores."""

    number: int  # The kernel's; ``UNKNOWN_NODE`` for cores that it does not place.
    cores: tuple[Core, ...]  # Those that ranks may use, ascending.


class NearDevice(NamedTuple):
    """A GPU, and the memory node near it."""

    name: str  # For people and variables: ``0``.
    node: int  # ``UNKNOWN_NODE`` if unknown.


class Nearness(NamedTuple):
    """How near a network adapter is to a GPU."""

    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.
    word: str = ""  # The class of the way between them: ``PIX``; empty if unknown.
    gb_per_s: float = 0.0  # Of that way; 0 if unknown.


class Inventory(NamedTuple):
    """What there is on one host."""

    # Those with cores, by number: no rank can run on others.
    nodes: tuple[InventoryNode, ...]
    # From each node to each, in that order, as the firmware reports them; empty where
    # all others are equally far.
    distances: tuple[tuple[int, ...], ...] = ()
    gpus: tuple[NearDevice, ...] = ()  # In the order of local ranks.
    nics: tuple[str, ...] = ()  # Names of those to train over.
    # By index of GPU and adapter; no entry where it is unknown.
    nearness: Mapping[tuple[int, int], Nearness] = {}
    host: str = ""  # Its name, for messages.

    @property
    def cores(self) -> tuple[Core, ...]:
        return tuple(core for node in self.nodes for core in node.cores)

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Return the indexes of the adapters that are nearest to a GPU, all equal."""
        own = {nic: near for (each, nic), near in self.nearness.items() if each == gpu}
        best = min((near.order for near in own.values()), default=None)
        return tuple(nic for nic, near in own.items() if near.order == best)

    def numbers_of(self, mask: int) -> tuple[int, ...]:
        return tuple(n.number for bit, n in enumerate(self.nodes) if mask >> bit & 1)


def inventory_of_machine(
    machine: Machine, gpus: Sequence[Gpu | None], host: str = ""
) -> Inventory:
    """Return what a machine has for ranks, as its agent reports it.

    ``gpus`` are in the order of local ranks, None for a rank without one.
    """
    names = tuple(dict.fromkeys(near.port for near in machine.near))
    places = {gpu.bus_id: index for index, gpu in enumerate(gpus) if gpu}
    none = NearDevice("", UNKNOWN_NODE)
    return Inventory(
        nodes_of_cores(machine.cores),
        gpus=tuple(NearDevice(g.visible_as, g.node) if g else none for g in gpus),
        nics=names,
        nearness={
            (places[near.gpu], names.index(near.port)): Nearness(near.order)
            for near in machine.near
            if near.gpu in places
        },
        host=host,
    )


def nodes_of_cores(cores: Sequence[Core]) -> tuple[InventoryNode, ...]:
    """Return cores by memory node."""
    ordered = sorted(cores, key=_core_order)
    by_node = groupby(ordered, key=lambda core: core.node)
    return tuple(InventoryNode(number, tuple(own)) for number, own in by_node)


def _core_order(core: Core) -> tuple[int, tuple[int, ...]]:
    return core.node, core.cpus


class Scope(StrEnum):
    """What is aligned as one."""

    RANK = "rank"  # Each rank by itself.
    JOB = "job"  # All ranks of the host together.


class AlignmentRequest(NamedTuple):
    """What the ranks of a host are to get."""

    num_ranks: int
    policy: Policy = Policy.BEST_EFFORT
    scope: Scope = Scope.RANK


class PlacementError(UsageError):
    """A policy refuses ranks; nothing was started."""

    def __init__(
        self, message: str, ranks: Sequence[int], reasons: Sequence[str]
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.reasons = tuple(reasons)


class CoreShare(NamedTuple):
    """What one rank gets of cores that some ranks divide among them."""

    pool: tuple[Core, ...]  # Those cores, by node and number.
    ranks: tuple[int, ...]  # Who divides them, ascending.
    is_near_gpu: bool  # Whether they are those near the GPUs of these ranks.
    cores: tuple[Core, ...]  # Its own; all of the pool where these are too few.
    home: int  # The memory node in the middle of what it gets.
    has_enough: bool  # Whether it need not share them; of no cores all have enough.


class RankPlace(NamedTuple):
    """What one rank gets."""

    rank: int  # Local rank.
    gpus: tuple[int, ...]  # Index of its GPU in the inventory; empty for none.
    # By node and number; others have them too where its share has not enough.
    cores: tuple[Core, ...]
    nodes: tuple[int, ...]  # Memory nodes that its policy chose; empty for any.
    home: int  # Memory node in the middle of its cores, or ``UNKNOWN_NODE``.
    nics: tuple[int, ...]  # Index of its adapter in the inventory; empty for none.
    is_preferred: bool  # Whether everything comes from the same, fewest nodes.
    reasons: tuple[str, ...]  # Why not, a sentence for each resource at fault.
    share: CoreShare

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))


def place(inventory: Inventory, request: AlignmentRequest) -> tuple[RankPlace, ...]:
    """Place all ranks of a host, in their order, alike on every call.

    Rank i has GPU i where there are as many as ranks, else no rank has one. No core is
    given out twice unless there are fewer than ranks. Policies that refuse nobody leave
    the even parts of cores contiguous and only report where one is not aligned; the
    others look for a node that has room.

    Raises:
        PlacementError: The policy refuses a rank, or all together.
        UsageError: The host has no cores to align with, or too many nodes.
    """
    num_nodes, policy = len(inventory.nodes), request.policy
    if request.num_ranks < 1:
        raise UsageError(f"num_ranks must be at least 1, got {request.num_ranks}.")
    if policy in {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE} and not num_nodes:
        raise UsageError(
            f"policy {policy} must have CPUs to align with, got none from any source. "
            "Read the machine itself, or take best-effort."
        )
    if policy is not Policy.NONE and num_nodes > _MAX_NODES:
        raise UsageError(
            f"memory nodes with cores must be at most {_MAX_NODES}, got {num_nodes}: "
            "every set of them is tried. Take policy none."
        )
    placer, ranks = _Placer(inventory, request), range(request.num_ranks)
    groups = [ranks] if request.scope is Scope.JOB else [[rank] for rank in ranks]
    return tuple(each for group in groups for each in placer.place(group))


def _share_cores(
    cores: tuple[Core, ...], homes: Sequence[int]
) -> tuple[CoreShare, ...]:
    """Divide cores among ranks in blocks, the low ranks' one core larger.

    ``homes`` are the memory nodes near each rank's GPU, or ``UNKNOWN_NODE``: with one
    such, or one without cores, all cores are divided among all ranks.
    """
    known = {core.node for core in cores} - {UNKNOWN_NODE}
    is_near_gpu = known.issuperset(homes)
    shares: dict[int, CoreShare] = {}
    for near in set(homes) if is_near_gpu else {UNKNOWN_NODE}:
        pool, ranks = cores, tuple(range(len(homes)))
        if is_near_gpu:
            pool = tuple(core for core in cores if core.node == near)
            ranks = tuple(rank for rank in ranks if homes[rank] == near)
        size, extra = divmod(len(pool), len(ranks))
        for place, rank in enumerate(ranks):
            start = place * size + min(place, extra)
            own = pool[start : start + size + (place < extra)]
            home = _middle_node(own)
            if not size and pool:
                # Each at another node, so that ranks are spread over all.
                own = pool
                home = pool[(2 * place + 1) * len(pool) // (2 * len(ranks))].node
            has_enough = size > 0 or not pool
            shares[rank] = CoreShare(pool, ranks, is_near_gpu, own, home, has_enough)
    return tuple(shares[rank] for rank in range(len(homes)))


def _middle_node(cores: Sequence[Core]) -> int:
    return cores[(len(cores) - 1) // 2].node if cores else UNKNOWN_NODE


class _Placer:
    """Tracks what is left from rank to rank."""

    def __init__(self, inventory: Inventory, request: AlignmentRequest) -> None:
        self._inventory = inventory
        # Without any node there is nothing to align with.
        self._policy = request.policy if inventory.nodes else Policy.NONE
        ranks = range(request.num_ranks)
        has_gpus = len(inventory.gpus) >= request.num_ranks
        self._gpus = [(rank,) if has_gpus else () for rank in ranks]
        homes = [inventory.gpus[r].node if has_gpus else UNKNOWN_NODE for r in ranks]
        self._shares = _share_cores(inventory.cores, homes)
        self._free = [list(node.cores) for node in inventory.nodes]
        self._num_given = [0] * len(inventory.nics)

    def place(self, ranks: Sequence[int]) -> list[RankPlace]:
        hints = {} if self._policy is Policy.NONE else self._hints(ranks)
        nodes = NodeSet(len(self._inventory.nodes))
        alignment = decide(self._policy, tuple(hints.values()), nodes)
        reasons = () if alignment.is_preferred else self._explain(ranks, hints)
        if not alignment.is_admitted:
            host = self._inventory.host
            where = f" on {host}" if host else ""
            name = f"rank {ranks[0]}{where}"
            if len(ranks) > 1:
                name = f"ranks 0-{ranks[-1]}{where} together"
            raise PlacementError(
                f"policy must be one that every rank can keep, got {self._policy} and "
                f"{name}: {'; '.join(reasons)}. Use fewer ranks, or take best-effort.",
                ranks,
                reasons,
            )
        return [self._take(rank, alignment, reasons) for rank in ranks]

    def _is_fixed(self, rank: int) -> bool:
        """Return whether a rank has the cores of its share and no others."""
        is_lax = self._policy in {Policy.NONE, Policy.BEST_EFFORT}
        return is_lax or not self._shares[rank].has_enough

    def _wanted(self, ranks: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many cores ranks want, and how many of them each node has free."""
        fixed = {c for r in ranks if self._is_fixed(r) for c in self._shares[r].cores}
        if not fixed:
            num_wanted = sum(len(self._shares[rank].cores) for rank in ranks)
            return num_wanted, [len(cores) for cores in self._free]
        own = Counter(core.node for core in fixed)
        return len(fixed), [own[node.number] for node in self._inventory.nodes]

    def _hints(self, ranks: Sequence[int]) -> dict[str, tuple[Hint, ...]]:
        nodes, gpus = self._inventory.nodes, self._inventory.gpus
        found: dict[str, tuple[Hint, ...]] = {}
        if own := [gpus[index].node for rank in ranks for index in self._gpus[rank]]:
            # Preferred is as few nodes as all GPUs of the host allow.
            total, free = (
                [counts[node.number] for node in nodes]
                for counts in (Counter(gpu.node for gpu in gpus), Counter(own))
            )
            hints = counted_hints(total, free, len(own)) or NOWHERE
            found["gpu"] = ANY if UNKNOWN_NODE in own else hints
        num_wanted, free = self._wanted(ranks)
        if num_wanted:
            total = [len(node.cores) for node in nodes]
            found["cpu"] = counted_hints(total, free, num_wanted) or NOWHERE
        return found

    def _take(
        self, rank: int, alignment: Alignment, reasons: tuple[str, ...]
    ) -> RankPlace:
        share, mask = self._shares[rank], alignment.mask
        cores = share.cores if self._is_fixed(rank) else self._take_cores(rank, mask)
        return RankPlace(
            rank=rank,
            gpus=self._gpus[rank],
            cores=cores,
            nodes=() if mask is None else self._inventory.numbers_of(mask),
            home=_middle_node(cores) if share.has_enough else share.home,
            nics=self._take_nic(rank),
            is_preferred=alignment.is_preferred,
            reasons=reasons,
            share=share,
        )

    def _take_cores(self, rank: int, mask: int | None) -> tuple[Core, ...]:
        """Give out cores, of one node where one has enough.

        The nodes of the mask are not left while they have enough together; then those
        come first that are near the rank's GPU.
        """
        nodes, distances = self._inventory.nodes, self._inventory.distances
        mask = (1 << len(nodes)) - 1 if mask is None else mask
        near = {self._inventory.gpus[gpu].node for gpu in self._gpus[rank]}
        near.discard(UNKNOWN_NODE)
        bits = (bit for bit, node in enumerate(nodes) if node.number in near)
        own = next(bits, (mask & -mask).bit_length() - 1)
        row = distances[own] if distances else [0] * len(nodes)
        order = sorted(
            range(len(nodes)), key=lambda b: (not mask >> b & 1, b != own, row[b], b)
        )
        wanted = len(self._shares[rank].cores)
        inside = [bit for bit in order if mask >> bit & 1]
        has_room = sum(len(self._free[bit]) for bit in inside) >= wanted
        tried = inside if has_room else order
        whole = [bit for bit in tried if len(self._free[bit]) >= wanted]
        taken: list[Core] = []
        for bit in [*whole[:1], *order]:
            num_more = wanted - len(taken)
            taken += self._free[bit][:num_more]
            del self._free[bit][:num_more]
        return tuple(sorted(taken, key=_core_order))

    def _take_nic(self, rank: int) -> tuple[int, ...]:
        """Give out the adapter nearest to a rank's GPU, of equals the least used."""
        near = [
            nic for g in self._gpus[rank] for nic in self._inventory.nearest_nics(g)
        ]
        if not near:
            return ()
        best = min(near, key=lambda nic: (self._num_given[nic], nic))
        self._num_given[best] += 1
        return (best,)

    def _explain(
        self, ranks: Sequence[int], hints: dict[str, tuple[Hint, ...]]
    ) -> tuple[str, ...]:
        """Return why ranks are not aligned: a sentence for each resource at fault."""
        is_one = self._policy is Policy.SINGLE_NUMA_NODE
        good = {
            name: [
                mask
                for mask, is_preferred in each
                if is_preferred and (not is_one or not mask or mask.bit_count() == 1)
            ]
            for name, each in hints.items()
        }
        num_cores, free = self._wanted(ranks)
        gpus = [index for rank in ranks for index in self._gpus[rank]]
        titles = ", ".join(self._inventory.gpus[n].name or str(n) for n in gpus)
        wants = {
            "gpu": f"gpu: GPU{'s' * (len(gpus) > 1)} {titles}",
            "cpu": f"cpu: {num_cores} core{'s' * (num_cores > 1)}",
        }
        if all(good.values()):
            return tuple(
                f"{wants[name]} only on {' or '.join(self._smallest(masks)[:4])}"
                + " or more" * (len(masks) > 4)
                for name, masks in good.items()
                if None not in masks
            )
        counts = zip(free, self._inventory.nodes, strict=True)
        texts = [f"{count} on node {node.number}" for count, node in counts]
        ends = {"gpu": "", "cpu": f" (free: {', '.join(texts)})"}
        obstacles = {"gpu": "near no node with usable cores", "cpu": "not free"}
        for name, each in hints.items():
            if some := self._smallest([hint.mask for hint in each]):
                obstacles[name] = f"not on fewer than {some[0]}"
        faulty = [name for name, masks in good.items() if not masks]
        return tuple(f"{wants[n]} {obstacles[n]}{ends[n]}" for n in faulty)

    def _smallest(self, masks: Iterable[int | None]) -> list[str]:
        """Return sets of nodes in words, those of the fewest first."""
        texts: list[str] = []
        for mask in sorted((m for m in masks if m), key=lambda m: (m.bit_count(), m)):
            numbers = "+".join(map(str, self._inventory.numbers_of(mask)))
            is_one = mask.bit_count() == 1
            texts.append(f"node {numbers}" if is_one else f"nodes {numbers} together")
        return texts
