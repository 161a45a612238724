"""What physics lets collectives reach: formulas and the link that binds.

All rates are of one direction in GB/s, 1e9 bytes/s; see docs/bench-limits.md. Nodes are
alike, and n ranks lie in order on N of them, g on each.

Source: bytes that must cross a node's edge, leave a GPU, or be read and written in
memory, whatever the algorithm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

TO_ALL = ("all_reduce", "all_gather", "reduce_scatter")
"""All ranks have a part in all of the result; a ring can do these."""

_PAIRWISE = ("alltoall", "alltoallv")
_FROM_ROOT = ("broadcast", "reduce")
_SPLIT_BY_ROOT = ("scatter", "gather")

COLLECTIVES = (
    *TO_ALL,
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

    @property
    def other_nodes(self) -> float:
        """(N-1)/N: the share of the data that is not a node's own."""
        return (self.num_nodes - 1) / self.num_nodes


def network_bound(
    test: str,
    layout: RankLayout,
    node_gb_per_s: float,
    *,
    is_reduced_in_network: bool = False,
) -> float:
    """Return what the links between nodes allow.

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    if test == "all_reduce" and is_reduced_in_network:
        return node_gb_per_s * 2 * layout.others
    share = layout.others / layout.other_nodes
    bounds = {
        **dict.fromkeys((*TO_ALL, *_SPLIT_BY_ROOT), node_gb_per_s * share),
        **dict.fromkeys(_PAIRWISE, node_gb_per_s / g * share),
        **dict.fromkeys(_FROM_ROOT, node_gb_per_s),
        "hypercube": node_gb_per_s / g * (n - 1) / (n - g),
        "sendrecv": node_gb_per_s,
    }
    return bounds[test]


def ring_bound(node_gb_per_s: float) -> float:
    """Return what a pure ring over the network reaches; trees may exceed it."""
    return node_gb_per_s


def gpu_bound(test: str, layout: RankLayout, gpu_gb_per_s: float) -> float:
    """Return what the way out of each GPU allows within a node, without NVLS.

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    bounds = {
        **dict.fromkeys(TO_ALL, gpu_gb_per_s * layout.others * g / (g - 1)),
        **dict.fromkeys(_FROM_ROOT, gpu_gb_per_s),
        **dict.fromkeys(_SPLIT_BY_ROOT, gpu_gb_per_s),
        **dict.fromkeys(_PAIRWISE, gpu_gb_per_s * (n - 1) / (g - 1)),
        "sendrecv": gpu_gb_per_s,
        "hypercube": gpu_gb_per_s * (n - 1) / (g - 1),
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

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    # By test, busbw over the bytes read and written, both by size over time.
    shares = {
        "all_reduce": (n - 1) / (n * g),
        "all_gather": (n - 1) / (n * g),
        "hypercube": (n - 1) / (n * g),
        "reduce_scatter": (n - 1) / (g * (n + 1)),
        "broadcast": 1 / g,
        "reduce": 1 / (g + 1),
        "alltoall": 1 / (2 * g),
        "alltoallv": 1 / (2 * g),
        "scatter": (n - 1) / (n + g - 2),
        "gather": (n - 1) / (n + g - 2),
        "sendrecv": 1 / (2 * g),
    }
    return memory_gb_per_s * shares[test]


@dataclass(frozen=True, slots=True)
class Limit:
    """The busbw that no algorithm can exceed on what was found."""

    bus_bandwidth_gb_per_s: float  # The bound.
    link: str  # What binds, with its rate, such as ``eth0, 3.125 GB/s``.
    # When the bound may be exceeded all the same, or where it is uncertain.
    note: str = ""
    # The same bound by the figures that NCCL counts on; None where NCCL takes no part.
    practical_gb_per_s: float | None = None
    practical_link: str = ""  # What binds then.

    def percent(self, busbw_gb_per_s: float) -> float:
        """Return a busbw in percent of the bound; above 100 an assumption is wrong."""
        return 100.0 * busbw_gb_per_s / self.bus_bandwidth_gb_per_s

    def doubt(self, busbw_gb_per_s: float) -> str:
        """Return what a busbw says against the bound; empty up to 100 %."""
        if busbw_gb_per_s <= self.bus_bandwidth_gb_per_s:
            return ""
        return (
            f"{self.percent(busbw_gb_per_s):.0f} % of the bound: something that it "
            f"takes for granted is wrong, such as {self._suspects}"
        )

    @property
    def _suspects(self) -> str:
        if self.link.startswith("memory"):
            return "that the data does not fit into the caches"
        return "that no switch reduces (NVLS, SHARP), or the number or rate of links"


class Rate(NamedTuple):
    """What links carry together, in one direction."""

    link: str  # Their name with their rate, for people: ``eth0, 3.125 GB/s``.
    gb_per_s: float  # What the hardware carries.
    # What NCCL counts on; None where it does not differ.
    practical_gb_per_s: float | None = None
    note: str = ""  # What is to be said where they bind.

    def pick(self, *, is_practical: bool) -> float:
        """Return the one figure or the other."""
        if is_practical and self.practical_gb_per_s is not None:
            return self.practical_gb_per_s
        return self.gb_per_s


class Islands(NamedTuple):
    """GPUs of a node that NVLink joins to some of the node's others, and not to all."""

    num_gpus: int  # Of each.
    way_out: Rate  # PCIe links of an island together.


class LimitWorld(NamedTuple):
    """Ranks on nodes that are alike.

    What a field does not have, None, either is not there or does not count; what
    counts and is not known is named in ``unknown``.
    """

    layout: RankLayout  # Where the ranks are.
    network: Rate | None = None  # All network links of a node together.
    path: Rate | None = None  # The best one of them.
    gpu: Rate | None = None  # The way out of each GPU to the others of its node.
    islands: Islands | None = None  # Where NVLink does not join all GPUs of a node.
    memory: Rate | None = None  # What a node's memory reads and writes together.
    has_gpus: bool = False  # Ranks are on GPUs, and NCCL carries their bytes.
    has_nvls: bool = False  # The NVLink switches may reduce.
    # What may bind and has no known rate, each as a clause.
    unknown: tuple[str, ...] = ()

    def lacking(self, reason: str) -> "LimitWorld":
        """Return the same world, of which one thing more is not known, if any."""
        return self._replace(unknown=(*self.unknown, reason)) if reason else self


class Bound(NamedTuple):
    """What one collective can reach."""

    collective: str  # Its name.
    limit: Limit | None  # None where nothing that may bind is known.
    reason: str = ""  # Why there is no limit; empty where there is one.


class _Candidate(NamedTuple):
    gb_per_s: float
    rate: Rate


class _Switches(NamedTuple):
    """Which switches are taken to reduce."""

    name: str = ""
    nvls: bool = False
    sharp: bool = False


_PLAIN = _Switches()
_REDUCING = (
    _Switches("NVLS", nvls=True),
    _Switches("SHARP", sharp=True),
    _Switches("NVLS and SHARP", nvls=True, sharp=True),
)


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
    least = _least(world, collective, _PLAIN)
    if least is None:
        reason = "; ".join(world.unknown) or "no link of these ranks is known"
        return Bound(collective, None, reason)
    practical = None
    if world.has_gpus:
        practical = _least(world, collective, _PLAIN, is_practical=True)
    limit = Limit(
        least.gb_per_s,
        least.rate.link,
        "; ".join(_notes(world, collective, least)),
        practical.gb_per_s if practical else None,
        practical.rate.link if practical else "",
    )
    return Bound(collective, limit)


def _least(
    world: LimitWorld, test: str, switches: _Switches, *, is_practical: bool = False
) -> _Candidate | None:
    candidates = _candidates(world, test, switches, is_practical=is_practical)
    return min(candidates, key=lambda each: each.gb_per_s, default=None)


def _candidates(
    world: LimitWorld, test: str, switches: _Switches, *, is_practical: bool
) -> Iterable[_Candidate]:
    layout = world.layout

    def rate(of: Rate) -> float:
        return of.pick(is_practical=is_practical)

    if layout.num_nodes > 1 and world.network is not None:
        # One rank of a node sends to the next node, over one path.
        links = (test == "sendrecv" and world.path) or world.network
        is_sharp = switches.sharp
        bound = network_bound(test, layout, rate(links), is_reduced_in_network=is_sharp)
        yield _Candidate(bound, links)
    if layout.ranks_per_node > 1 and world.gpu is not None:
        is_nvls = switches.nvls and test == "all_reduce"
        own = rate(world.gpu)
        bound = nvls_bound(layout, own) if is_nvls else gpu_bound(test, layout, own)
        yield _Candidate(bound, world.gpu)
    if world.islands is not None:
        # Between islands PCIe is what the network is between nodes.
        num_gpus, way_out = world.islands
        num_islands = layout.num_ranks // num_gpus
        among = RankLayout(layout.num_ranks, num_islands, num_gpus)
        bound = network_bound(test, among, rate(way_out))
        yield _Candidate(bound, way_out)
    if world.memory is not None:
        bound = memory_bound(test, layout, rate(world.memory))
        yield _Candidate(bound, world.memory)


def _notes(world: LimitWorld, test: str, least: _Candidate) -> Iterable[str]:
    if least.rate.note:
        yield least.rate.note
    if world.has_gpus and test == "all_reduce":
        yield from _notes_of_switches(world, least)
    if world.has_gpus and world.network is not None and test in TO_ALL:
        ring = ring_bound(world.network.gb_per_s)
        if ring < least.gb_per_s:
            yield f"a pure ring reaches at most {ring:.4g} GB/s"


def _notes_of_switches(world: LimitWorld, least: _Candidate) -> Iterable[str]:
    best = least.gb_per_s
    for switches in _REDUCING:
        if switches.nvls and not world.has_nvls:
            continue
        bound = _least(world, "all_reduce", switches)
        if bound is not None and bound.gb_per_s > best:
            best = bound.gb_per_s
            yield (
                f"switches that reduce ({switches.name}) allow {best:.4g} GB/s, "
                f"set by {bound.rate.link}"
            )
