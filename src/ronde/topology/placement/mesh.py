"""Find the slowest link in the groups along each axis of a parallel layout.

``ronde run`` numbers ranks host by host, and local rank r has GPU r by bus order.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from operator import itemgetter
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.parallel.layout import AXES, Layout
from ronde.topology.graph import GpuDevice, HostTopology
from ronde.topology.limits import (
    KnownRates,
    LimitWorld,
    RankLayout,
    with_gpus,
    with_network,
)
from ronde.topology.placement.plan import choose_gpus

_MAX_RANKS = 1 << 20
_ASK_FOR_RATE = "; --link-rate gives it"  # Of another command.


class AxisPlan(NamedTuple):
    """The slowest link of the groups along one axis."""

    axis: str
    link: str  # The slowest of known ones in any group; empty if none is known.
    gb_per_s: float | None  # A group's share of it, in one direction.
    num_sharing: int  # Groups of this axis that share this link.
    unknown: tuple[str, ...]  # Links of unknown rate, as clauses.


class MeshPlan(NamedTuple):
    """A layout on hosts, and the slowest link of each axis."""

    layout: Layout  # Without -1.
    num_hosts: int
    axes: tuple[AxisPlan, ...]  # Those of size 2 or more, outermost first.


def plan_mesh(
    hosts: Sequence[HostTopology], layout: Layout, ranks_per_host: int | None = None
) -> MeshPlan:
    """Find the slowest link of each axis; one host stands for any number of equal ones.

    Raises:
        UsageError: The sizes do not fit.
    """
    num = _count_ranks(hosts, ranks_per_host)
    layout = _fit(layout, len(hosts), num)
    links = _Links(hosts, [choose_gpus(host, num)[0][:num] for host in hosts], num)
    names = [axis for axis in AXES if layout.sizes[axis] > 1]
    axes = tuple(_plan_axis(layout, axis, links) for axis in names)
    return MeshPlan(layout, layout.num_ranks // num, axes)


def _count_ranks(hosts: Sequence[HostTopology], given: int | None) -> int:
    counts = [len(host.gpus) for host in hosts]
    if given is None and len({*counts}) > 1:
        listed = ", ".join(f"{host.name} {len(host.gpus)}" for host in hosts)
        raise UsageError(
            f"the hosts have different numbers of GPUs: {listed}. Give the ranks of "
            f"each host: -n {min(counts) or 1}"
        )
    num = counts[0] if given is None else given
    if not num:
        raise UsageError("-n is required for hosts without GPUs.")
    if 0 < min(counts) < num:
        raise UsageError(
            f"-n must be at most {min(counts)}, the number of GPUs of a host, "
            f"got {num}."
        )
    return num


def _fit(layout: Layout, num_hosts: int, ranks_per_host: int) -> Layout:
    """Return the layout with -1 replaced; raise unless its ranks fill whole hosts."""
    sizes = astuple(layout)
    if num_hosts > 1 or -1 in sizes:
        layout = layout.resolve(num_hosts * ranks_per_host)
    num_ranks = layout.num_ranks
    if num_ranks > _MAX_RANKS:
        raise UsageError(
            f"the number of ranks must be at most {_MAX_RANKS}, got {num_ranks}."
        )
    if num_ranks % ranks_per_host:
        most = min(ranks_per_host, num_ranks)
        fitting = max(n for n in range(1, most + 1) if num_ranks % n == 0)
        raise UsageError(
            f"{'*'.join(AXES)} must be a multiple of the {ranks_per_host} ranks on a "
            f"host, got {'*'.join(map(str, sizes))} = {num_ranks}. Use -n {fitting}, "
            "or change a size."
        )
    return layout


class _Links:
    """Cache of the links inside groups of ranks."""

    def __init__(
        self,
        hosts: Sequence[HostTopology],
        gpus: Sequence[Sequence[GpuDevice]],
        ranks_per_host: int,
    ) -> None:
        self._hosts, self._gpus, self._num = hosts, gpus, ranks_per_host
        self._found: dict[tuple[int, tuple[int, ...]], LimitWorld] = {}

    def split(self, group: Iterable[int]) -> dict[int, tuple[int, ...]]:
        parts: dict[int, tuple[int, ...]] = {}
        for rank in group:
            host, local = divmod(rank, self._num)
            parts[host] = (*parts.get(host, ()), local)
        return parts

    def within(self, host: int, local_ranks: tuple[int, ...]) -> LimitWorld:
        key = host % len(self._hosts), local_ranks
        if key not in self._found:
            gpus, num = self._gpus[key[0]], len(local_ranks)
            world = LimitWorld(RankLayout(num, 1, num), has_gpus=bool(gpus))
            used = [gpus[rank] for rank in local_ranks if gpus]
            self._found[key] = (
                with_gpus(world, self._hosts[key[0]], used)
                if gpus
                else world.lacking("ronde bench --limit measures memory")
            )
        return self._found[key]

    def network(self, host: int) -> LimitWorld:
        key = host % len(self._hosts), ()
        if key not in self._found:
            world = LimitWorld(RankLayout(2 * self._num, 2, self._num))
            found = with_network(world, self._hosts[key[0]], KnownRates())
            unknown = (why.removesuffix(_ASK_FOR_RATE) for why in found.unknown)
            self._found[key] = found._replace(unknown=tuple(unknown))
        return self._found[key]


def _plan_axis(layout: Layout, axis: str, links: _Links) -> AxisPlan:
    found = list(_find_links(list(map(links.split, layout.groups(axis))), links))
    rates = [
        (rate.gb_per_s / num, rate.link, num)
        for own, num in found
        if (rate := own.islands.way_out if own.islands else own.gpu or own.network)
    ]
    rate, link, num_sharing = min(rates, key=itemgetter(0), default=(None, "", 1))
    unknown = tuple(dict.fromkeys(why for world, _ in found for why in world.unknown))
    return AxisPlan(axis, link, rate, num_sharing, unknown)


def _find_links(
    parts: Sequence[Mapping[int, tuple[int, ...]]], links: _Links
) -> Iterator[tuple[LimitWorld, int]]:
    """Yield the links that groups use, and the number of groups that share each."""
    for own in parts:
        for host, local_ranks in own.items():
            if len(local_ranks) > 1:
                yield links.within(host, local_ranks), 1
    leaving = Counter(host for own in parts if len(own) > 1 for host in own)
    for host, num_groups in leaving.items():
        yield links.network(host), num_groups
