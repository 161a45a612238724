"""Places the ranks of one host: its GPU, an even part of the cores, an adapter."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
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
    """A GPU or a network adapter."""

    name: str  # For people and variables: ``0`` of a GPU, ``mlx5_0``.
    node: int  # The memory node near it, or ``UNKNOWN_NODE``.


class Nearness(NamedTuple):
    """How near a network adapter is to a GPU."""

    order: tuple[float, ...]  # Smaller is nearer; of equals, none is better.
    word: str = ""  # The class of the way between them: ``PIX``; empty if unknown.
    gb_per_s: float = 0.0  # Of that way; 0 if unknown.


class Inventory(NamedTuple):
    """What there is on one host."""

    # Those with cores, by number: no rank can run on others.
    nodes: tuple[InventoryNode, ...]
    # From each node to each, in that order, as the firmware reports them.
    distances: tuple[tuple[int, ...], ...]
    gpus: tuple[NearDevice, ...] = ()  # In the order of local ranks.
    nics: tuple[NearDevice, ...] = ()  # Those to train over.
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
    machine: Machine, gpus: Sequence[Gpu | None] | None = None, host: str = ""
) -> Inventory:
    """Return what a machine has for ranks, as its agent reports it.

    Adapters are the ports to train over whose nearness is known; their memory nodes are
    unknown. ``gpus`` are in the order of local ranks, None for a rank without one;
    without ``gpus`` all that the machine has.
    """
    own = machine.gpus if gpus is None else tuple(gpus)
    nodes = nodes_of_cores(machine.cores)
    names = dict.fromkeys(near.port for near in machine.near)
    ports = {port: index for index, port in enumerate(names)}
    places = {gpu.bus_id: index for index, gpu in enumerate(own) if gpu}
    none = NearDevice("", UNKNOWN_NODE)
    return Inventory(
        nodes,
        plain_distances(len(nodes)),
        tuple(NearDevice(gpu.visible_as, gpu.node) if gpu else none for gpu in own),
        tuple(NearDevice(port, UNKNOWN_NODE) for port in ports),
        {
            (places[near.gpu], ports[near.port]): Nearness(near.order)
            for near in machine.near
            if near.gpu in places
        },
        host,
    )


def nodes_of_cores(cores: Sequence[Core]) -> tuple[InventoryNode, ...]:
    """Return cores by memory node."""
    by_node: dict[int, list[Core]] = {}
    for core in sorted(cores, key=lambda core: (core.node, core.cpus)):
        by_node.setdefault(core.node, []).append(core)
    return tuple(InventoryNode(number, tuple(own)) for number, own in by_node.items())


def plain_distances(num_nodes: int) -> tuple[tuple[int, ...], ...]:
    """Return distances where all other nodes are equally far."""
    rows = range(num_nodes)
    return tuple(tuple(10 if a == b else 20 for b in rows) for a in rows)


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


class CorePool(NamedTuple):
    """Cores that some ranks divide among them."""

    cores: tuple[Core, ...]  # By node and number.
    ranks: tuple[int, ...]  # Ascending.
    is_near_gpu: bool  # Whether they are those near the GPUs of these ranks.


class CoreShare(NamedTuple):
    """What one rank gets of a pool."""

    pool: CorePool
    cores: tuple[Core, ...]  # All of the pool where these are fewer than ranks.
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
    """Place all ranks of a host, in their order.

    The same input gives the same result on every call. Rank i has GPU i where there are
    as many as ranks, else no rank has one. No core is given out that the inventory does
    not list, and none twice unless there are fewer than ranks.

    Policies that refuse nobody leave the even parts of cores contiguous and only report
    where one is not aligned; the others look for a node that has room. Adapters are
    chosen by the class of the way to the GPU, its bandwidth and how often they were
    given out.

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
    placer = _Placer(inventory, request)
    ranks = range(request.num_ranks)
    if request.scope is Scope.JOB:
        return tuple(placer.place(ranks))
    return tuple(placer.place([rank])[0] for rank in ranks)


def _share_cores(
    cores: tuple[Core, ...], homes: Sequence[int]
) -> tuple[CoreShare, ...]:
    """Divide cores among ranks in blocks, the low ranks' one core larger.

    ``homes`` are the memory nodes near each rank's GPU, or ``UNKNOWN_NODE``: with one
    such, or one without cores, all cores are divided among all ranks.
    """
    ranks = range(len(homes))
    known = {core.node for core in cores} - {UNKNOWN_NODE}
    pools = [CorePool(cores, tuple(ranks), is_near_gpu=False)]
    if known.issuperset(homes):
        pools = [
            CorePool(
                tuple(core for core in cores if core.node == node),
                tuple(rank for rank in ranks if homes[rank] == node),
                is_near_gpu=True,
            )
            for node in sorted(set(homes))
        ]
    found: dict[int, CoreShare] = {}
    for pool in pools:
        found |= dict(zip(pool.ranks, _divide(pool), strict=True))
    return tuple(found[rank] for rank in ranks)


def _divide(pool: CorePool) -> list[CoreShare]:
    cores, num_ranks = pool.cores, len(pool.ranks)
    size, extra = divmod(len(cores), num_ranks)
    if not size:
        # Each at another node, so that ranks are spread over all.
        middles = (
            (2 * n + 1) * len(cores) // (2 * num_ranks) for n in range(num_ranks)
        )
        homes = [cores[middle].node if cores else UNKNOWN_NODE for middle in middles]
        return [CoreShare(pool, cores, home, not cores) for home in homes]
    starts = [n * size + min(n, extra) for n in range(num_ranks + 1)]
    blocks = [cores[starts[n] : starts[n + 1]] for n in range(num_ranks)]
    return [CoreShare(pool, b, _middle_node(b), has_enough=True) for b in blocks]


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
        self._bits = {node.number: bit for bit, node in enumerate(inventory.nodes)}
        self._bits.pop(UNKNOWN_NODE, None)
        self._free = [list(node.cores) for node in inventory.nodes]
        self._num_given = [0] * len(inventory.nics)

    def place(self, ranks: Sequence[int]) -> list[RankPlace]:
        policy, inventory = self._policy, self._inventory
        hints = {} if policy is Policy.NONE else self._hints(ranks)
        nodes = NodeSet(len(inventory.nodes), inventory.distances)
        alignment = decide(policy, tuple(hints.values()), nodes)
        reasons: tuple[str, ...] = ()
        if not alignment.is_preferred:
            reasons = self._explain(ranks, hints)
            if not alignment.is_admitted:
                raise self._refusal(ranks, reasons)
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
        gpus = self._inventory.gpus
        found: dict[str, tuple[Hint, ...]] = {}
        if own := [gpus[index] for rank in ranks for index in self._gpus[rank]]:
            # Preferred is as few nodes as all GPUs of the host allow.
            is_known = all(gpu.node != UNKNOWN_NODE for gpu in own)
            hints = counted_hints(self._counts(gpus), self._counts(own), len(own))
            found["gpu"] = (hints or NOWHERE) if is_known else ANY
        num_wanted, free = self._wanted(ranks)
        if num_wanted:
            total = [len(node.cores) for node in self._inventory.nodes]
            found["cpu"] = counted_hints(total, free, num_wanted) or NOWHERE
        return found

    def _counts(self, devices: Iterable[NearDevice]) -> list[int]:
        counts = Counter(device.node for device in devices)
        return [counts[node.number] for node in self._inventory.nodes]

    def _take(
        self, rank: int, alignment: Alignment, reasons: tuple[str, ...]
    ) -> RankPlace:
        share = self._shares[rank]
        cores = share.cores
        if not self._is_fixed(rank):
            cores = self._take_cores(rank, alignment.mask)
        nodes = () if alignment.mask is None else alignment.mask
        return RankPlace(
            rank=rank,
            gpus=self._gpus[rank],
            cores=cores,
            nodes=self._inventory.numbers_of(nodes) if nodes else (),
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
        num_nodes, distances = len(self._free), self._inventory.distances
        mask = (1 << num_nodes) - 1 if mask is None else mask
        near = [self._inventory.gpus[gpu].node for gpu in self._gpus[rank]]
        own = next((self._bits[n] for n in near if n in self._bits), None)
        if own is None:
            own = (mask & -mask).bit_length() - 1
        order = sorted(
            range(num_nodes),
            key=lambda b: (not mask >> b & 1, b != own, distances[own][b], b),
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
        return tuple(sorted(taken, key=lambda core: (core.node, core.cpus)))

    def _take_nic(self, rank: int) -> tuple[int, ...]:
        """Give out the adapter nearest to a rank's GPU, of equals the least used."""
        near = self._inventory.nearness
        for gpu in self._gpus[rank]:
            candidates = [n for n in range(len(self._num_given)) if (gpu, n) in near]
            if candidates:
                best = min(
                    candidates, key=lambda n: (near[gpu, n].order, self._num_given[n])
                )
                self._num_given[best] += 1
                return (best,)
        return ()

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
            "gpu": f"GPU{'s' * (len(gpus) > 1)} {titles}",
            "cpu": f"{num_cores} core{'s' * (num_cores > 1)}",
        }
        faulty = [name for name, masks in good.items() if not masks]
        if not faulty:
            return tuple(
                f"{name}: {wants[name]} only on {self._some_nodes(masks)}"
                for name, masks in good.items()
                if None not in masks
            )
        reasons = {n: f"{n}: {wants[n]} {self._obstacle(n, hints[n])}" for n in faulty}
        if "cpu" in reasons:
            counts = zip(free, self._inventory.nodes, strict=True)
            texts = [f"{count} on node {node.number}" for count, node in counts]
            reasons["cpu"] += f" (free: {', '.join(texts)})"
        return tuple(reasons.values())

    def _some_nodes(self, masks: Iterable[int | None]) -> str:
        """Return where something could come from: ``node 0 or nodes 1+2 together``."""
        smallest = sorted((m for m in masks if m), key=lambda m: (m.bit_count(), m))
        texts = [self._nodes(mask) for mask in smallest]
        return " or ".join(texts[:4]) + (" or more" if len(texts) > 4 else "")

    def _obstacle(self, name: str, hints: Sequence[Hint]) -> str:
        masks = [hint.mask for hint in hints if hint.mask]
        if masks:
            smallest = min(masks, key=lambda mask: (mask.bit_count(), mask))
            return f"not on fewer than {self._nodes(smallest)}"
        return "near no node with usable cores" if name == "gpu" else "not free"

    def _nodes(self, mask: int) -> str:
        numbers = self._inventory.numbers_of(mask)
        if len(numbers) == 1:
            return f"node {numbers[0]}"
        return f"nodes {'+'.join(map(str, numbers))} together"

    def _refusal(self, ranks: Sequence[int], reasons: Sequence[str]) -> PlacementError:
        host = self._inventory.host
        where = f" on {host}" if host else ""
        name = f"rank {ranks[0]}{where}"
        if len(ranks) > 1:
            name = f"ranks 0-{ranks[-1]}{where} together"
        return PlacementError(
            f"policy must be one that every rank can keep, got {self._policy} and "
            f"{name}: {'; '.join(reasons)}. Use fewer ranks, or take best-effort.",
            ranks,
            reasons,
        )
