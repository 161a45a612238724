"""What physics lets collectives reach: formulas and the link that binds.

All rates are of one direction in GB/s, 1e9 bytes/s; see docs/bench-limits.md. Nodes are
alike, and n ranks lie in order on N of them, g on each. A formula raises ``KeyError``
for a test that it does not know.

Source: bytes that must cross a node's edge, leave a GPU, or be read and written in
memory, whatever the algorithm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter")
_PAIRWISE = ("alltoall", "alltoallv")
_FROM_ROOT = ("broadcast", "reduce")
_SPLIT_BY_ROOT = ("scatter", "gather")

COLLECTIVES = (
    *_TO_ALL,
    *_FROM_ROOT,
    *_PAIRWISE,
    *_SPLIT_BY_ROOT,
    "sendrecv",
    "hypercube",
)
"""Those that have formulas, as ``ronde bench`` spells them."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Where the ranks are."""

    num_ranks: int  # n, at least 2.
    num_nodes: int  # N, at least 1.
    ranks_per_node: int  # g; the largest where nodes differ.

    @property
    def others(self) -> float:
        """(n-1)/n: the share of the data that is not a rank's own."""
        return (self.num_ranks - 1) / self.num_ranks


def network_bound(
    test: str,
    layout: RankLayout,
    node_gb_per_s: float,
    *,
    is_reduced_in_network: bool = False,
) -> float:
    """Return what the links between nodes allow."""
    n, g, num_nodes = layout.num_ranks, layout.ranks_per_node, layout.num_nodes
    if test == "all_reduce" and is_reduced_in_network:
        return node_gb_per_s * 2 * layout.others
    share = layout.others / ((num_nodes - 1) / num_nodes)
    bounds = {
        **dict.fromkeys((*_TO_ALL, *_SPLIT_BY_ROOT), node_gb_per_s * share),
        **dict.fromkeys(_PAIRWISE, node_gb_per_s / g * share),
        **dict.fromkeys((*_FROM_ROOT, "sendrecv"), node_gb_per_s),
        "hypercube": node_gb_per_s / g * (n - 1) / (n - g),
    }
    return bounds[test]


def gpu_bound(test: str, layout: RankLayout, gpu_gb_per_s: float) -> float:
    """Return what the way out of each GPU allows within a node, without NVLS."""
    n, g = layout.num_ranks, layout.ranks_per_node
    bounds = {
        **dict.fromkeys(_TO_ALL, gpu_gb_per_s * layout.others * g / (g - 1)),
        **dict.fromkeys((*_PAIRWISE, "hypercube"), gpu_gb_per_s * (n - 1) / (g - 1)),
        **dict.fromkeys((*_FROM_ROOT, *_SPLIT_BY_ROOT, "sendrecv"), gpu_gb_per_s),
    }
    return bounds[test]


def nvls_bound(
    layout: RankLayout, gpu_gb_per_s: float, *, counts_write_back: bool = True
) -> float:
    """Return what all_reduce may reach when the NVLink switches reduce (NVLS)."""
    g = layout.ranks_per_node
    bound = gpu_gb_per_s * 2 * layout.others
    return bound * g / (g + 1) if counts_write_back else bound


def memory_bound(test: str, layout: RankLayout, memory_gb_per_s: float) -> float:
    """Return what a node's memory allows.

    Every byte of input is read at least once and every byte of result written, on the
    node with the most of both; in place, what is already there is not written.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    # By test, busbw over the bytes read and written, both by size over time.
    shares = {
        **dict.fromkeys(("all_reduce", "all_gather", "hypercube"), (n - 1) / (n * g)),
        "reduce_scatter": (n - 1) / (g * (n + 1)),
        "broadcast": 1 / g,
        "reduce": 1 / (g + 1),
        **dict.fromkeys((*_PAIRWISE, "sendrecv"), 1 / (2 * g)),
        **dict.fromkeys(_SPLIT_BY_ROOT, (n - 1) / (n + g - 2)),
    }
    return memory_gb_per_s * shares[test]


@dataclass(frozen=True, slots=True)
class Limit:
    """The busbw that no algorithm can exceed on what was found."""

    bus_bandwidth_gb_per_s: float  # The bound.
    link: str  # What binds, with its rate, such as ``eth0, 3.125 GB/s``.
    # When the bound may be exceeded all the same, or where it is uncertain.
    note: str = ""
    # The same bound by NCCL's figures; None where NCCL takes no part.
    practical_gb_per_s: float | None = None
    practical_link: str = ""  # What binds then.

    def percent(self, busbw_gb_per_s: float) -> float:
        """Return a busbw in percent of the bound; above 100 an assumption is wrong."""
        return 100.0 * busbw_gb_per_s / self.bus_bandwidth_gb_per_s

    def doubt(self, busbw_gb_per_s: float) -> str:
        """Return what a busbw says against the bound; empty up to 100 %."""
        if busbw_gb_per_s <= self.bus_bandwidth_gb_per_s:
            return ""
        suspects = (
            "that no switch reduces (NVLS, SHARP), or the number or rate of links"
        )
        if self.link.startswith("memory"):
            suspects = "that the data does not fit into the caches"
        return (
            f"{self.percent(busbw_gb_per_s):.0f} % of the bound: something that it "
            f"takes for granted is wrong, such as {suspects}"
        )


class Rate(NamedTuple):
    """The rate of some links together, in one direction."""

    link: str  # Their name with their rate, for people: ``eth0, 3.125 GB/s``.
    gb_per_s: float  # Of the hardware.
    practical_gb_per_s: float | None = None  # NCCL's, where it differs.
    note: str = ""  # For people, where they bind.


class Islands(NamedTuple):
    """GPUs of a node that NVLink joins to some of the node's others, and not to all."""

    num_gpus: int  # Of each.
    way_out: Rate  # PCIe links of an island together.


class LimitWorld(NamedTuple):
    """Ranks on nodes that are alike; None is not there or does not count."""

    layout: RankLayout
    network: Rate | None = None  # All network links of a node together.
    path: Rate | None = None  # The best one of them.
    gpu: Rate | None = None  # The way out of each GPU to the others of its node.
    islands: Islands | None = None  # Where NVLink does not join all GPUs of a node.
    memory: Rate | None = None  # Reads and writes of a node's memory together.
    has_gpus: bool = False  # Ranks are on GPUs, and NCCL carries their bytes.
    has_nvls: bool = False  # The NVLink switches may reduce.
    unknown: tuple[str, ...] = ()  # What may bind and has no known rate, as clauses.

    def lacking(self, reason: str) -> "LimitWorld":
        """Return the same world with one more reason in ``unknown``, if any."""
        return self._replace(unknown=(*self.unknown, reason)) if reason else self


class Bound(NamedTuple):
    """What one collective can reach."""

    collective: str
    limit: Limit | None  # None where nothing that may bind is known.
    reason: str = ""  # Why there is no limit.


# Switches that may be taken to reduce.
_NVLS, _SHARP = "NVLS", "SHARP"
_BY_RATE = itemgetter(0)


def bounds_of(
    world: LimitWorld, collectives: Sequence[str] = COLLECTIVES
) -> tuple[Bound, ...]:
    """Return what each collective can reach, in the order given."""
    return tuple(bound_of(world, collective) for collective in collectives)


def bound_of(world: LimitWorld, collective: str) -> Bound:
    """Return what one collective can reach.

    Where a link of ``world.unknown`` may bind the bound still holds; it is only not
    known to be the tightest.
    """
    if world.layout.num_ranks < 2:
        return Bound(collective, None, "one rank exchanges nothing")
    if collective not in COLLECTIVES:
        return Bound(collective, None, f"{collective} has no formula")
    found = list(_candidates(world, collective))
    if not found:
        reason = "; ".join(world.unknown) or "no link of these ranks is known"
        return Bound(collective, None, reason)
    gb_per_s, rate = min(found, key=_BY_RATE)
    note = "; ".join(_notes(world, collective, gb_per_s, rate))
    limit = Limit(gb_per_s, rate.link, note)
    if world.has_gpus:
        gb_per_s, rate = min(
            _candidates(world, collective, is_practical=True), key=_BY_RATE
        )
        limit = replace(limit, practical_gb_per_s=gb_per_s, practical_link=rate.link)
    return Bound(collective, limit)


def _candidates(
    world: LimitWorld,
    test: str,
    switches: Sequence[str] = (),
    *,
    is_practical: bool = False,
) -> Iterable[tuple[float, Rate]]:
    """Yield what each kind of link allows, if some switches reduce."""
    layout = world.layout

    def rate(of: Rate) -> float:
        is_other = is_practical and of.practical_gb_per_s is not None
        return (of.practical_gb_per_s or 0.0) if is_other else of.gb_per_s

    if layout.num_nodes > 1 and world.network is not None:
        # One rank of a node sends to the next node, over one path.
        links = (test == "sendrecv" and world.path) or world.network
        is_sharp = _SHARP in switches
        bound = network_bound(test, layout, rate(links), is_reduced_in_network=is_sharp)
        yield bound, links
    if layout.ranks_per_node > 1 and world.gpu is not None:
        is_nvls = _NVLS in switches and test == "all_reduce"
        own = rate(world.gpu)
        bound = nvls_bound(layout, own) if is_nvls else gpu_bound(test, layout, own)
        yield bound, world.gpu
    if world.islands is not None:
        # Between islands PCIe is what the network is between nodes.
        num_gpus, way_out = world.islands
        num_islands = layout.num_ranks // num_gpus
        among = RankLayout(layout.num_ranks, num_islands, num_gpus)
        yield network_bound(test, among, rate(way_out)), way_out
    if world.memory is not None:
        yield memory_bound(test, layout, rate(world.memory)), world.memory


def _notes(world: LimitWorld, test: str, gb_per_s: float, rate: Rate) -> Iterable[str]:
    if rate.note:
        yield rate.note
    if world.has_gpus and test == "all_reduce":
        best = gb_per_s
        for switches in ((_NVLS,), (_SHARP,), (_NVLS, _SHARP)):
            bound, link = min(_candidates(world, test, switches), key=_BY_RATE)
            if bound > best and (world.has_nvls or _NVLS not in switches):
                best = bound
                yield (
                    f"switches that reduce ({' and '.join(switches)}) allow {best:.4g} "
                    f"GB/s, set by {link.link}"
                )
    if world.has_gpus and world.network is not None and test in _TO_ALL:
        ring = world.network.gb_per_s
        if ring < gb_per_s:
            yield f"a pure ring reaches at most {ring:.4g} GB/s"
