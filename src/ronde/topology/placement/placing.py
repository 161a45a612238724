"""Places the ranks of one host: GPUs, cores, memory and network adapters."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE, Core
from ronde.topology.placement.policies import Nodes, Policy, Verdict, decide
from ronde.topology.placement.request import Request, Scope, check_request
from ronde.topology.placement.shares import Share, middle_node, share_cores
from ronde.topology.placement.stock import Demand, Stock
from ronde.topology.placement.supply import Supply


class RankPlace(NamedTuple):
    """What one rank gets.

    Attributes:
        rank: Local rank.
        gpus: Places of its GPUs in the supply.
        cores: Its physical cores, by node and number; others' too without
            ``has_enough``.
        nodes: Numbers of the memory nodes that its policy chose; empty for any.
        home: Memory node in the middle of its cores, or ``UNKNOWN_NODE``.
        memory_nodes: Numbers of the nodes on which memory is set aside for it.
        nics: Places of its adapters in the supply.
        is_preferred: Whether everything comes from the same, fewest nodes.
        reasons: Why not, of each resource at fault a sentence.
        share: What its even part of the cores is; None where a number was asked for.
    """

    rank: int
    gpus: tuple[int, ...]
    cores: tuple[Core, ...]
    nodes: tuple[int, ...]
    home: int
    memory_nodes: tuple[int, ...]
    nics: tuple[int, ...]
    is_preferred: bool
    reasons: tuple[str, ...]
    share: Share | None

    @property
    def has_enough(self) -> bool:
        """Whether its cores are its own."""
        return self.share is None or self.share.has_enough

    @property
    def cpus(self) -> tuple[int, ...]:
        """Hardware threads of its cores, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))


def place(supply: Supply, request: Request) -> tuple[RankPlace, ...]:
    """Place all ranks of a host, in their order.

    The same input gives the same result on every call. No core is given out that the
    supply does not list, and none twice unless there are fewer than ranks.

    With an even part of the cores, policies that refuse nobody leave it contiguous and
    only say where it is not aligned; the others look for a node that has room. Sets of
    nodes are chosen by ``policies.decide``; within a set, GPUs by their numbers, and
    adapters by the class of the way to the GPU, its bandwidth and how often they were
    given out.

    Raises:
        PlacementError: The policy refuses a rank, or all together.
        UsageError: There is not what is asked for.
    """
    check_request(supply, request)
    gpus = _gpus_by_rank(supply, request)
    if gpus is None and not request.num_cores:
        # Which cores are shared by whom follows from the GPUs: these come first.
        gpus = [each.gpus for each in _place(supply, request, None)]
    return _place(supply, request, gpus)


def _place(
    supply: Supply, request: Request, gpus: Sequence[tuple[int, ...]] | None
) -> tuple[RankPlace, ...]:
    placer = _Placer(supply, request, gpus)
    return tuple(one for group in _groups(request) for one in placer.place(group))


def _groups(request: Request) -> list[range]:
    """Return which ranks are aligned as one."""
    if request.scope is Scope.JOB:
        return [range(request.num_ranks)]
    return [range(rank, rank + 1) for rank in range(request.num_ranks)]


class _Placer:
    """Keeps what is left from rank to rank.

    Args:
        supply: What there is.
        request: What each rank is to get.
        gpus: Each rank's; None where they are chosen. Nobody has an even part of the
            cores then.
    """

    def __init__(
        self,
        supply: Supply,
        request: Request,
        gpus: Sequence[tuple[int, ...]] | None,
    ) -> None:
        self._supply = supply
        self._request = request
        wanted = request.num_ranks * request.num_nics
        self._is_nic_shared = wanted > len(supply.nics)
        self._stock = Stock(supply, is_nic_shared=self._is_nic_shared)
        self._gpus = gpus
        self._shares: tuple[Share, ...] = ()
        if gpus is not None and not request.num_cores:
            near = [self._node_near(own) for own in gpus]
            self._shares = share_cores(supply.cores, near)

    def place(self, ranks: range) -> list[RankPlace]:
        """Place ranks that are aligned as one."""
        supply, request = self._supply, self._request
        demands = [self._demand(rank) for rank in ranks]
        together = self._together(demands)
        nodes = Nodes(len(supply.nodes), supply.distances, request.is_closest)
        # Without any node there is nothing to align with.
        policy = request.policy if supply.nodes else Policy.NONE
        hints = () if policy is Policy.NONE else self._stock.hints(together).values()
        verdict = decide(policy, tuple(hints), nodes)
        reasons: tuple[str, ...] = ()
        if not verdict.is_preferred:
            # Imported where it is needed: a start must not wait for what is rare.
            from ronde.topology.placement.refusals import explain, refusal

            reasons = explain(supply, self._stock, together, policy)
            if not verdict.is_admitted:
                raise refusal(supply, policy, ranks, reasons)
        return [
            self._taken(rank, demand, verdict, reasons)
            for rank, demand in zip(ranks, demands, strict=True)
        ]

    def _demand(self, rank: int) -> Demand:
        request = self._request
        gpus = () if self._gpus is None else self._gpus[rank]
        demand = Demand(
            gpus=gpus,
            num_gpus=len(gpus) if self._gpus else request.num_gpus or 0,
            num_cores=request.num_cores,
            num_nics=request.num_nics,
            memory_bytes=request.memory_bytes,
        )
        if not self._shares:
            return demand
        share = self._shares[rank]
        is_fixed = not share.has_enough or request.policy in {
            Policy.NONE,
            Policy.BEST_EFFORT,
        }
        return demand._replace(
            num_cores=len(share.cores), own_cores=share.cores if is_fixed else ()
        )

    def _together(self, demands: Sequence[Demand]) -> Demand:
        if len(demands) == 1:
            return demands[0]
        own = tuple(dict.fromkeys(core for d in demands for core in d.own_cores))
        num_nics = sum(demand.num_nics for demand in demands)
        return Demand(
            gpus=tuple(gpu for demand in demands for gpu in demand.gpus),
            num_gpus=sum(demand.num_gpus for demand in demands),
            num_cores=len(own) or sum(demand.num_cores for demand in demands),
            own_cores=own,
            num_nics=min(num_nics, len(self._supply.nics)),
            memory_bytes=sum(demand.memory_bytes for demand in demands),
        )

    def _taken(
        self, rank: int, demand: Demand, verdict: Verdict, reasons: tuple[str, ...]
    ) -> RankPlace:
        supply, stock = self._supply, self._stock
        mask = (1 << len(supply.nodes)) - 1 if verdict.mask is None else verdict.mask
        gpus = stock.take_gpus(demand, verdict.mask)
        order = self._order(mask, self._node_near(gpus))
        cores = stock.take_cores(demand, order, mask)
        share = self._shares[rank] if self._shares else None
        home = middle_node(cores) if share is None or share.has_enough else share.home
        memory = 0
        if demand.memory_bytes:
            limit = mask if verdict.mask is not None else 0
            memory = stock.take_memory(
                demand.memory_bytes, limit, self._order(mask, home)
            )
        return RankPlace(
            rank=rank,
            gpus=gpus,
            cores=cores,
            nodes=() if verdict.mask is None else supply.numbers_of(mask),
            home=home,
            memory_nodes=supply.numbers_of(memory),
            nics=tuple(stock.take_nics(demand.num_nics, gpus, mask)),
            is_preferred=verdict.is_preferred,
            reasons=reasons,
            share=share,
        )

    def _order(self, mask: int, near: int) -> list[int]:
        """Return all nodes, those of a set first, then those nearest to one."""
        supply = self._supply
        own = supply.bit_of(near)
        if own is None:
            own = (mask & -mask).bit_length() - 1

        def badness(bit: int) -> tuple[bool, bool, int, int]:
            return (not mask >> bit & 1, bit != own, supply.distances[own][bit], bit)

        return sorted(range(len(supply.nodes)), key=badness)

    def _node_near(self, gpus: Sequence[int]) -> int:
        """Return the memory node near all of some GPUs, or ``UNKNOWN_NODE``."""
        nodes = {self._supply.gpus[gpu].node for gpu in gpus}
        return nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE


def _gpus_by_rank(supply: Supply, request: Request) -> list[tuple[int, ...]] | None:
    """Return the GPUs of each rank; None where so many as are asked for are chosen.

    Where none are asked for a rank has the one of its number, as programs take them by
    ``LOCAL_RANK``.
    """
    if request.num_gpus:
        return None
    has_enough = request.num_gpus is None and len(supply.gpus) >= request.num_ranks
    return [(rank,) if has_enough else () for rank in range(request.num_ranks)]
