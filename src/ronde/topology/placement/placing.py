"""Place the ranks of one host: a GPU, an equal share of the cores, and an adapter.

Hints for several resources are merged into one set of memory nodes, which a policy
accepts or refuses; the rules are those of Kubernetes' TopologyManager. A set of nodes
is a bit mask; bit 0 is the first node with CPUs. Nodes without CPUs have no bit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.machine import UNKNOWN_NODE, Core, Gpu, Machine

# Memory nodes with cores of a host: every set of them is tried.
_MAX_NODES = 16


class Policy(StrEnum):
    """The policy for ranks with resources on different memory nodes."""

    NONE = "none"  # Nothing is aligned, no rank refused.
    BEST_EFFORT = "best-effort"  # Aligned if possible, no rank refused.
    RESTRICTED = "restricted"  # Refused unless all comes from the same, fewest nodes.
    SINGLE_NUMA_NODE = "single-numa-node"  # Refused unless all comes from one node.


class Hint(NamedTuple):
    """A set of memory nodes that can satisfy a request for one resource."""

    mask: int | None  # Nodes that it takes; None where any will do.
    is_preferred: bool  # No smaller set could ever suffice.


ANY = (Hint(None, is_preferred=True),)
"""Hints for a resource that may come from any nodes."""

NOWHERE = (Hint(None, is_preferred=False),)
"""Hints for a request that no set of nodes can satisfy."""


class Alignment(NamedTuple):
    """The memory nodes for a request, and the policy's decision."""

    mask: int | None  # Nodes to use; None for any.
    is_preferred: bool
    is_admitted: bool


def counted_hints(
    total: Sequence[int], free: Sequence[int], quantity: int
) -> tuple[Hint, ...]:
    """Return a hint for each set of nodes that can satisfy a request now.

    The smallest sets that could satisfy it if all resources were free are preferred.
    ``total`` and ``free`` are indexed by the node's bit.
    """
    had, left = ([0], [0])
    for sums, counts in ((had, total), (left, free)):
        for count in counts:
            sums += [each + count for each in sums]
    masks = range(1, len(had))
    smallest = min((m.bit_count() for m in masks if had[m] >= quantity), default=0)
    able = (mask for mask in masks if left[mask] >= quantity)
    return tuple(Hint(mask, mask.bit_count() == smallest) for mask in able)


def decide(
    policy: Policy, resources: Sequence[Sequence[Hint]], all_mask: int
) -> Alignment:
    """Merge the hints of all resources, and apply a policy to the result.

    ``all_mask`` has the bits of all nodes with CPUs.
    """
    if policy is Policy.NONE:
        return Alignment(None, is_preferred=True, is_admitted=True)
    if policy is Policy.SINGLE_NUMA_NODE:
        mask, is_preferred = merge(list(map(_of_one_node, resources)), all_mask)
        limited = None if mask == all_mask else mask
        return Alignment(limited, is_preferred, is_preferred)
    mask, is_preferred = merge(resources, all_mask)
    return Alignment(mask, is_preferred, is_preferred or policy is Policy.BEST_EFFORT)


def _of_one_node(hints: Iterable[Hint]) -> list[Hint]:
    return [h for h in hints if h.is_preferred and (h.mask or 1).bit_count() == 1]


def merge(resources: Sequence[Sequence[Hint]], all_mask: int) -> Hint:
    """Return the best combination of one hint per resource.

    A combination has the nodes that all its hints have in common. It is preferred if
    all its hints are preferred and have the same nodes. Eight nodes and four resources
    have billions of combinations, so only the common masks are listed.
    """
    wanted = [{hint.mask for hint in hints if hint.is_preferred} for hints in resources]
    named = {mask for masks in wanted for mask in masks if mask}
    named |= {all_mask} if all(None in masks for masks in wanted) else set()
    preferred = {m for m in named if all({m, None} & masks for masks in wanted)}
    count = best_count(resources)
    best: Hint | None = None
    for mask in preferred or _common_masks(resources, all_mask):
        best = compare(best, Hint(mask, bool(preferred)), count)
    return best or Hint(all_mask, is_preferred=False)


def compare(current: Hint | None, candidate: Hint, count: int) -> Hint | None:
    """Return the better of two combinations; of equals, the first.

    ``count`` is the result of ``best_count``, the best size for sets that are not
    preferred: a smaller set does not suffice for some resource.
    """

    def rank(hint: Hint) -> tuple[int, int, int, int]:
        mask = hint.mask or 0
        size = mask.bit_count()
        if hint.is_preferred:
            return (0, 0, size, mask)
        return (1 if size <= count else 2, max(0, count - size), size, mask)

    if not candidate.mask or (current and rank(current) <= rank(candidate)):
        return current
    return candidate


def best_count(resources: Iterable[Iterable[Hint]]) -> int:
    """Return the least number of memory nodes for the most demanding resource."""
    masks = ([h.mask for h in hints if h.mask is not None] for hints in resources)
    sizes = (min((mask.bit_count() for mask in each), default=0) for each in masks)
    return max(sizes, default=0)


def _common_masks(resources: Sequence[Sequence[Hint]], all_mask: int) -> set[int]:
    """Return the common masks of all combinations of hints, in ``n 2**n`` steps."""
    # The number of combinations with at least certain nodes in common is a product over
    # the resources; differences of these give those with exactly these nodes.
    ways = [1] * (all_mask + 1)
    for hints in resources:
        counts = [0] * len(ways)
        for hint in hints:
            counts[all_mask if hint.mask is None else hint.mask] = 1
        for low, high in _pairs(all_mask):
            counts[low] += counts[high]
        ways = [all_ways * count for all_ways, count in zip(ways, counts, strict=True)]
    for low, high in _pairs(all_mask):
        ways[low] -= ways[high]
    return {mask for mask, num_ways in enumerate(ways) if num_ways}


def _pairs(all_mask: int) -> Iterator[tuple[int, int]]:
    for bit in (1 << node for node in range(all_mask.bit_length())):
        yield from ((m, m | bit) for m in range(all_mask + 1) if not m & bit)


class NearDevice(NamedTuple):
    """A GPU in an inventory, with its memory node."""

    name: str  # In output and variables: ``0``.
    node: int  # ``UNKNOWN_NODE`` if unknown.


class Nearness(NamedTuple):
    """The distance of a network adapter from a GPU."""

    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.
    word: str = ""  # The class of the path between them: ``PIX``; empty if unknown.
    gb_per_s: float = 0.0  # Of that path; 0 if unknown.


class Inventory(NamedTuple):
    """The cores, GPUs and adapters of a host that ranks may use."""

    cores: tuple[Core, ...]  # Those that ranks may use.
    gpus: tuple[NearDevice, ...] = ()  # In the order of local ranks.
    nics: tuple[str, ...] = ()  # Names of those to train over.
    # By index of GPU and adapter; no entry where it is unknown.
    nearness: Mapping[tuple[int, int], Nearness] = {}
    host: str = ""  # Its name, for messages.

    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """Return the indexes of the adapters that are nearest to a GPU."""
        own = {nic: near for (each, nic), near in self.nearness.items() if each == gpu}
        best = min((near.order for near in own.values()), default=None)
        return tuple(nic for nic, near in own.items() if near.order == best)


def inventory_of_machine(
    machine: Machine, gpus: Sequence[Gpu | None], host: str = ""
) -> Inventory:
    """Return a machine's inventory; ``gpus`` has the GPU of each local rank."""
    names = tuple(dict.fromkeys(near.port for near in machine.near))
    indexes = {gpu.bus_id: index for index, gpu in enumerate(gpus) if gpu}
    none = NearDevice("", UNKNOWN_NODE)
    return Inventory(
        machine.cores,
        gpus=tuple(NearDevice(g.visible_as, g.node) if g else none for g in gpus),
        nics=names,
        nearness={
            (indexes[near.gpu], names.index(near.port)): Nearness(near.order)
            for near in machine.near
            if near.gpu in indexes
        },
        host=host,
    )


class Scope(StrEnum):
    """The scope of alignment: the cores and GPUs of each rank, or of all ranks."""

    RANK = "rank"  # Each rank by itself.
    JOB = "job"  # All ranks of the host together.


class AlignmentRequest(NamedTuple):
    """The number of ranks on a host, and the policy to align their resources."""

    num_ranks: int
    policy: Policy = Policy.BEST_EFFORT
    scope: Scope = Scope.RANK


class PlacementError(UsageError):
    """Raised if a policy refuses ranks."""


class CoreShare(NamedTuple):
    """One rank's share of cores that are divided among several ranks."""

    pool: tuple[Core, ...]  # Those cores, by node and number.
    ranks: tuple[int, ...]  # The ranks that divide them, ascending.
    is_near_gpu: bool  # They are near the GPUs of these ranks.
    cores: tuple[Core, ...]  # Its own; all of the pool where these are too few.
    home: int  # The memory node in the middle of its cores.
    has_enough: bool  # It does not share them; True without any cores.


class RankPlacement(NamedTuple):
    """The cores, GPU, memory nodes and adapter chosen for one rank."""

    rank: int  # Local rank.
    gpus: tuple[int, ...]  # Index of its GPU in the inventory; empty for none.
    # By node and number; shared with other ranks if there are too few cores.
    cores: tuple[Core, ...]
    nodes: tuple[int, ...]  # Memory nodes that its policy chose; empty for any.
    home: int  # Memory node in the middle of its cores, or ``UNKNOWN_NODE``.
    nics: tuple[int, ...]  # Index of its adapter in the inventory; empty for none.
    is_preferred: bool  # All resources come from the same, fewest nodes.
    reasons: tuple[str, ...]  # Why not, a sentence for each resource at fault.
    share: CoreShare

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))


def place(inventory: Inventory, request: AlignmentRequest) -> tuple[RankPlacement, ...]:
    """Place all ranks of a host, in rank order; the result is deterministic.

    Rank i gets GPU i if there are at least as many GPUs as ranks, else no rank has a
    GPU. Ranks share cores only if there are fewer cores than ranks. Policies that
    refuse no rank keep the shares contiguous, and report ranks that are not aligned;
    the other policies search for a node with enough free cores.

    Raises:
        PlacementError: The policy refuses a rank, or the job as a whole.
        UsageError: The host has no cores to align with, or too many nodes.
    """
    placer, policy = _Placer(inventory, request), request.policy
    num_nodes, ranks = len(placer.nodes), range(request.num_ranks)
    if policy in {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE} and not num_nodes:
        raise UsageError(
            f"policy {policy} needs the CPUs of the host, but no source lists them. "
            "Read the machine itself, or use best-effort."
        )
    if policy is not Policy.NONE and num_nodes > _MAX_NODES:
        raise UsageError(
            f"policy {policy} supports at most {_MAX_NODES} memory nodes with cores, "
            f"but the host has {num_nodes}. Use policy none."
        )
    groups = [ranks] if request.scope is Scope.JOB else [[rank] for rank in ranks]
    return tuple(each for group in groups for each in placer.place(group))


def _share_cores(cores: tuple[Core, ...], homes: Sequence[int]) -> list[CoreShare]:
    """Divide cores among ranks in blocks; the first ranks may get one core more."""
    # If a GPU is not near a node with cores, divide all cores among all ranks.
    known = {core.node for core in cores} - {UNKNOWN_NODE}
    is_near_gpu = known.issuperset(homes)
    homes = homes if is_near_gpu else [UNKNOWN_NODE] * len(homes)
    shares: dict[int, CoreShare] = {}
    for near in set(homes):
        pool = tuple(core for core in cores if core.node == near or not is_near_gpu)
        ranks = tuple(rank for rank, home in enumerate(homes) if home == near)
        size, extra = divmod(len(pool), len(ranks))
        for index, rank in enumerate(ranks):
            start = index * size + min(index, extra)
            own = pool[start : start + size + (index < extra)]
            home = _middle_node(own)
            if not size and pool:
                # Spread the home nodes of ranks over all nodes.
                own = pool
                home = pool[(2 * index + 1) * len(pool) // (2 * len(ranks))].node
            has_enough = size > 0 or not pool
            shares[rank] = CoreShare(pool, ranks, is_near_gpu, own, home, has_enough)
    return [shares[rank] for rank in range(len(homes))]


def _middle_node(cores: Sequence[Core]) -> int:
    return cores[(len(cores) - 1) // 2].node if cores else UNKNOWN_NODE


class _Placer:
    def __init__(self, inventory: Inventory, request: AlignmentRequest) -> None:
        num_ranks = request.num_ranks
        if num_ranks < 1:
            raise UsageError(f"num_ranks must be at least 1, got {num_ranks}.")
        cores = tuple(sorted(inventory.cores, key=lambda core: (core.node, core.cpus)))
        # The bits of masks stand for them, in this order.
        self.nodes = sorted({core.node for core in cores})
        self._inventory = inventory
        # Without any node there is nothing to align with.
        self._policy = request.policy if self.nodes else Policy.NONE
        self._has_gpus = len(inventory.gpus) >= num_ranks
        gpus = inventory.gpus if self._has_gpus else ()
        homes = [gpu.node for gpu in gpus[:num_ranks]] or [UNKNOWN_NODE] * num_ranks
        self._shares = _share_cores(cores, homes)
        self._free = {n: [c for c in cores if c.node == n] for n in self.nodes}
        self._total = [len(own) for own in self._free.values()]
        self._num_given = [0] * len(inventory.nics)

    def place(self, ranks: Sequence[int]) -> list[RankPlacement]:
        hints = {} if self._policy is Policy.NONE else self._hints(ranks)
        all_mask = (1 << len(self.nodes)) - 1
        alignment = decide(self._policy, tuple(hints.values()), all_mask)
        reasons = () if alignment.is_preferred else self._explain(ranks, hints)
        if not alignment.is_admitted:
            where = f" on {self._inventory.host}" if self._inventory.host else ""
            together = f"ranks 0-{ranks[-1]}{where} together"
            name = together if len(ranks) > 1 else f"rank {ranks[0]}{where}"
            raise PlacementError(
                f"policy {self._policy} refuses {name}: {'; '.join(reasons)}. Use "
                "fewer ranks, or best-effort."
            )
        return [self._allocate(rank, alignment, reasons) for rank in ranks]

    def _gpus(self, ranks: Iterable[int]) -> list[NearDevice]:
        return [self._inventory.gpus[rank] for rank in ranks if self._has_gpus]

    def _is_fixed(self, rank: int) -> bool:
        """Return True if a rank must use exactly the cores of its share."""
        is_lax = self._policy in {Policy.NONE, Policy.BEST_EFFORT}
        return is_lax or not self._shares[rank].has_enough

    def _wanted(self, ranks: Sequence[int]) -> tuple[int, list[int]]:
        """Return the number of cores that ranks need, and the free cores per node."""
        fixed = {c for r in ranks if self._is_fixed(r) for c in self._shares[r].cores}
        if not fixed:
            num_wanted = sum(len(self._shares[rank].cores) for rank in ranks)
            return num_wanted, [len(cores) for cores in self._free.values()]
        own = Counter(core.node for core in fixed)
        return len(fixed), [own[node] for node in self.nodes]

    def _hints(self, ranks: Sequence[int]) -> dict[str, tuple[Hint, ...]]:
        found: dict[str, tuple[Hint, ...]] = {}
        if own := [gpu.node for gpu in self._gpus(ranks)]:
            # Preferred is as few nodes as all GPUs of the host allow.
            all_counts = Counter(gpu.node for gpu in self._inventory.gpus), Counter(own)
            total, free = ([counts[n] for n in self.nodes] for counts in all_counts)
            hints = counted_hints(total, free, len(own)) or NOWHERE
            found["gpu"] = ANY if UNKNOWN_NODE in own else hints
        num_wanted, free = self._wanted(ranks)
        if num_wanted:
            found["cpu"] = counted_hints(self._total, free, num_wanted) or NOWHERE
        return found

    def _allocate(
        self, rank: int, alignment: Alignment, reasons: tuple[str, ...]
    ) -> RankPlacement:
        share, mask = self._shares[rank], alignment.mask
        cores = (
            share.cores if self._is_fixed(rank) else self._allocate_cores(rank, mask)
        )
        return RankPlacement(
            rank=rank,
            gpus=(rank,) if self._has_gpus else (),
            cores=cores,
            nodes=() if mask is None else self._numbers(mask),
            home=_middle_node(cores) if share.has_enough else share.home,
            nics=self._allocate_nic(rank) if self._has_gpus else (),
            is_preferred=alignment.is_preferred,
            reasons=reasons,
            share=share,
        )

    def _numbers(self, mask: int) -> tuple[int, ...]:
        return tuple(n for bit, n in enumerate(self.nodes) if mask >> bit & 1)

    def _allocate_cores(self, rank: int, mask: int | None) -> tuple[Core, ...]:
        """Allocate cores within the mask, if possible near the GPU and on one node."""
        inside = self.nodes if mask is None else self._numbers(mask)
        near = {gpu.node for gpu in self._gpus([rank])}
        order = sorted(self.nodes, key=lambda n: (n not in inside, n not in near, n))
        wanted, free = len(self._shares[rank].cores), self._free
        has_room = sum(len(free[node]) for node in order[: len(inside)]) >= wanted
        tried = order[: len(inside)] if has_room else order
        whole = [node for node in tried if len(free[node]) >= wanted]
        taken: list[Core] = []
        for node in [*whole[:1], *order]:
            num_more = wanted - len(taken)
            taken += free[node][:num_more]
            del free[node][:num_more]
        return tuple(sorted(taken, key=lambda core: (core.node, core.cpus)))

    def _allocate_nic(self, gpu: int) -> tuple[int, ...]:
        """Allocate the adapter nearest to a rank's GPU; of equals, the least used."""
        near = self._inventory.nearest_nics(gpu)
        if not near:
            return ()
        best = min(near, key=lambda nic: (self._num_given[nic], nic))
        self._num_given[best] += 1
        return (best,)

    def _explain(
        self, ranks: Sequence[int], hints: dict[str, tuple[Hint, ...]]
    ) -> tuple[str, ...]:
        """Return the reasons for failed alignment, one for each resource at fault."""
        is_one = self._policy is Policy.SINGLE_NUMA_NODE
        allowed = {n: _of_one_node(h) if is_one else h for n, h in hints.items()}
        good = {
            name: [hint.mask for hint in own if hint.is_preferred]
            for name, own in allowed.items()
        }
        num_cores, free = self._wanted(ranks)
        names = [gpu.name for gpu in self._gpus(ranks)]
        wants = {
            "gpu": f"gpu: GPU{'s' * (len(names) > 1)} {', '.join(names)}",
            "cpu": f"cpu: {num_cores} core{'s' * (num_cores > 1)}",
        }
        if all(good.values()):
            return tuple(
                f"{wants[name]} only on {' or '.join(self._smallest(masks)[:4])}"
                + " or more" * (len(masks) > 4)
                for name, masks in good.items()
                if None not in masks
            )
        counts = zip(free, self.nodes, strict=True)
        texts = ", ".join(f"{count} on node {node}" for count, node in counts)
        found: list[str] = []
        for name in (name for name, masks in good.items() if not masks):
            some = self._smallest([hint.mask for hint in hints[name]])
            no_room = "not free" if name == "cpu" else "near no node with usable cores"
            obstacle = f"not on fewer than {some[0]}" if some else no_room
            end = f" (free: {texts})" if name == "cpu" else ""
            found.append(f"{wants[name]} {obstacle}{end}")
        return tuple(found)

    def _smallest(self, masks: Iterable[int | None]) -> list[str]:
        texts: list[str] = []
        for mask in sorted((m for m in masks if m), key=lambda m: (m.bit_count(), m)):
            numbers = "+".join(map(str, self._numbers(mask)))
            is_one = mask.bit_count() == 1
            texts.append(f"node {numbers}" if is_one else f"nodes {numbers} together")
        return texts
