"""Two levels: rings within each host, and between the ranks of equal place on each.

A byte that has reached a host is not fetched over the network again. As many
rings run between the hosts as each has ranks, each with its share, so that all links of
a host are used. Best where the ranks of a host reach each other much faster than those
of another. Source: Cho, Finkler, Kung and Hunter, "BlueConnect: decomposing all-reduce
for deep learning on heterogeneous network hierarchy", 2019.

Hosts have equally many ranks here, numbered host by host.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ronde.collectives.algorithms.ring import chain, collect, distribute
from ronde.collectives.schedule import Chunks, Load, Round, Schedule, Step, renamed


@dataclass(frozen=True, slots=True)
class Grid:
    """Hosts of equally many ranks.

    Attributes:
        num_hosts: How many hosts.
        per_host: How many ranks each has.
    """

    num_hosts: int
    per_host: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.num_hosts * self.per_host

    def rank(self, host: int, place: int) -> int:
        """Return which rank has ``place`` on ``host``."""
        return host * self.per_host + place

    def within(self, rank: int) -> Callable[[int], int]:
        """Return what turns places into the ranks of ``rank``'s host."""
        host = rank // self.per_host
        return lambda place: self.rank(host, place)

    def across(self, rank: int) -> Callable[[int], int]:
        """Return what turns hosts into the ranks of ``rank``'s place."""
        place = rank % self.per_host
        return lambda host: self.rank(host, place)


Runs = list[tuple[int, int]]
"""First chunk and number of chunks."""


def all_reduce(grid: Grid, numel: int) -> Schedule:
    """Reduce shares on the host, then each share over the hosts, then gather them."""
    num_hosts, per_host = grid.num_hosts, grid.per_host
    chunks = Chunks(grid.size, numel)

    def part(rank: int) -> Iterator[Round]:
        host, place = divmod(rank, per_host)

        def share(index: int) -> Runs:
            return [(index * num_hosts, num_hosts)]

        def piece(index: int) -> Runs:
            return [(place * num_hosts + index, 1)]

        within, across = grid.within(rank), grid.across(rank)
        yield from _placed(collect(place, per_host), within, share)
        yield from _placed(collect(host, num_hosts), across, piece)
        yield from _placed(distribute(host, num_hosts), across, piece)
        yield from _placed(distribute(place, per_host), within, share)

    inside = Load(per_host - 1, chunks.largest(num_hosts))
    between = Load(2 * (num_hosts - 1), chunks.largest())
    return Schedule(
        "hierarchical all_reduce", grid.size, chunks, (inside, between, inside), part
    )


def reduce_scatter(grid: Grid, chunks: Chunks) -> Schedule:
    """Reduce on the host what goes to each place, then over the hosts.

    Args:
        grid: The hosts.
        chunks: One a rank, which that rank is to have.
    """

    def part(rank: int) -> Iterator[Round]:
        host, place = divmod(rank, grid.per_host)
        yield from _placed(
            collect(place, grid.per_host), grid.within(rank), _column(grid)
        )
        yield from _placed(
            collect(host, grid.num_hosts), grid.across(rank), _own(grid, place)
        )

    inside, between = _loads(grid, chunks)
    return Schedule(
        "hierarchical reduce_scatter", grid.size, chunks, (inside, between), part
    )


def all_gather(grid: Grid, chunks: Chunks) -> Schedule:
    """Gather over the hosts what each place has, then on the host.

    Args:
        grid: The hosts.
        chunks: One a rank, which that rank has.
    """

    def part(rank: int) -> Iterator[Round]:
        host, place = divmod(rank, grid.per_host)
        yield from _placed(
            distribute(host, grid.num_hosts), grid.across(rank), _own(grid, place)
        )
        yield from _placed(
            distribute(place, grid.per_host), grid.within(rank), _column(grid)
        )

    inside, between = _loads(grid, chunks)
    return Schedule(
        "hierarchical all_gather", grid.size, chunks, (between, inside), part
    )


def broadcast(grid: Grid, numel: int, root: int) -> Schedule:
    """Pass from host to host, then from rank to rank on each."""
    num_hosts, per_host = grid.num_hosts, grid.per_host
    root_host, root_place = divmod(root, per_host)

    def part(rank: int) -> Iterator[Round]:
        host, place = divmod(rank, per_host)
        across, within = grid.across(rank), grid.within(rank)
        for steps in chain((host - root_host) % num_hosts, num_hosts):
            is_of_column = place == root_place
            yield renamed(
                steps if is_of_column else (),
                lambda position: across((position + root_host) % num_hosts),
            )
        for steps in chain((place - root_place) % per_host, per_host):
            yield renamed(
                steps, lambda position: within((position + root_place) % per_host)
            )

    loads = (Load(num_hosts - 1, numel), Load(per_host - 1, numel))
    return Schedule("hierarchical broadcast", grid.size, Chunks(1, numel), loads, part)


def _placed(
    rounds: Iterable[Round],
    rank_of: Callable[[int], int],
    runs_of: Callable[[int], Runs],
) -> Iterator[Round]:
    """Turn a ring's rounds into those of some ranks, each chunk into others."""
    for steps in rounds:
        yield tuple(
            Step(step.action, rank_of(step.peer), *run)
            for step in steps
            for run in runs_of(step.first)
        )


def _column(grid: Grid) -> Callable[[int], Runs]:
    """Return what turns a place into the chunks of its ranks on all hosts."""
    return lambda place: [(grid.rank(host, place), 1) for host in range(grid.num_hosts)]


def _own(grid: Grid, place: int) -> Callable[[int], Runs]:
    """Return what turns a host into the chunk of its rank of ``place``."""
    return lambda host: [(grid.rank(host, place), 1)]


def _loads(grid: Grid, chunks: Chunks) -> tuple[Load, Load]:
    """Return what a rank does within the host, and between hosts."""
    columns = [
        sum(stop - start for start, stop in map(chunks.span, ranks))
        for place in range(grid.per_host)
        for ranks in [range(place, grid.size, grid.per_host)]
    ]
    return (
        Load(grid.per_host - 1, max(columns)),
        Load(grid.num_hosts - 1, chunks.largest()),
    )
