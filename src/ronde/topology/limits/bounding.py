"""The bound of each collective in a world: of all that may bind, the tightest."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.topology.limits.formulas import (
    COLLECTIVES,
    TO_ALL,
    Layout,
    gpu_bound,
    memory_bound,
    network_bound,
    nvls_bound,
    ring_bound,
)
from ronde.topology.limits.limit import Limit
from ronde.topology.limits.world import Rate, World


class Bound(NamedTuple):
    """What one collective can reach.

    Attributes:
        collective: Its name.
        limit: None where nothing that may bind is known.
        reason: Why there is no limit; empty where there is one.
    """

    collective: str
    limit: Limit | None
    reason: str = ""


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
    world: World, collectives: Sequence[str] = COLLECTIVES
) -> tuple[Bound, ...]:
    """Return what each collective can reach, in the order given."""
    return tuple(bound_of(world, collective) for collective in collectives)


def bound_of(world: World, collective: str) -> Bound:
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
    world: World, test: str, switches: _Switches, *, is_practical: bool = False
) -> _Candidate | None:
    candidates = _candidates(world, test, switches, is_practical=is_practical)
    return min(candidates, key=lambda each: each.gb_per_s, default=None)


def _candidates(
    world: World, test: str, switches: _Switches, *, is_practical: bool
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
        among = Layout(layout.num_ranks, num_islands, num_gpus)
        bound = network_bound(test, among, rate(way_out))
        yield _Candidate(bound, way_out)
    if world.memory is not None:
        bound = memory_bound(test, layout, rate(world.memory))
        yield _Candidate(bound, world.memory)


def _notes(world: World, test: str, least: _Candidate) -> Iterable[str]:
    if least.rate.note:
        yield least.rate.note
    if world.has_gpus and test == "all_reduce":
        yield from _notes_of_switches(world, least)
    if world.has_gpus and world.network is not None and test in TO_ALL:
        ring = ring_bound(world.network.gb_per_s)
        if ring < least.gb_per_s:
            yield f"a pure ring reaches at most {ring:.4g} GB/s"


def _notes_of_switches(world: World, least: _Candidate) -> Iterable[str]:
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
