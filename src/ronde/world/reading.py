"""What one launcher's variables say, before launchers are compared."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from ronde.errors import WorldError
from ronde.world.value import Launcher


@dataclass(frozen=True, slots=True)
class Place:
    """A place among the ranks, None where nobody said.

    Attributes:
        rank: As in ``World``.
        size: As in ``World``.
        local_rank: As in ``World``.
        local_size: As in ``World``.
        cross_rank: As in ``World``.
        cross_size: As in ``World``.
        node_rank: Index of this node among the nodes.
        num_nodes: Number of nodes.
    """

    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None

    def known(self) -> dict[str, int]:
        """Return what was said, by attribute."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


INDEX_AND_COUNT = (
    ("rank", "size"),
    ("local_rank", "local_size"),
    ("cross_rank", "cross_size"),
    ("node_rank", "num_nodes"),
)

_ORDER = (
    *((index, "below", count) for index, count in INDEX_AND_COUNT),
    *((count, "at most", "size") for _, count in INDEX_AND_COUNT[1:]),
    *((index, "below", "size") for index, _ in INDEX_AND_COUNT[1:]),
)
"""What must hold between any two numbers that are both known."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One launcher's view of this process.

    Attributes:
        launcher: Whose variables they are.
        place: What they say.
        said: The variables that were there, as ``NAME=value``.
        missing: The variables that this launcher always sets and that are not there.
        job_id: As in ``RankInfo``.
        hosts: As in ``RankInfo``.
    """

    launcher: Launcher
    place: Place
    said: tuple[str, ...]
    missing: tuple[str, ...] = ()
    job_id: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it says at least who of how many this process is."""
        return not self.missing

    @property
    def is_stray(self) -> bool:
        """Whether it is left over: it gives no rank, and nothing implies other ranks.

        So is ``LOCAL_RANK=0`` alone. A launcher's own variables are never left over.
        """
        counts = {count for _, count in INDEX_AND_COUNT}
        is_of_one = all(
            value == (name in counts) for name, value in self.place.known().items()
        )
        is_plain = self.launcher is Launcher.PLAIN
        return is_plain and self.place.rank is None and is_of_one

    @property
    def is_above_slurm(self) -> bool:
        """Whether Slurm's variables are left over from starting this launcher."""
        by_hand = (Launcher.SLURM, Launcher.PLAIN)
        return self.is_complete and self.launcher not in by_hand

    def agrees_with(self, other: "Reading") -> bool:
        """Say whether nothing that both say differs."""
        theirs = other.place.known()
        return all(
            theirs.get(name, value) == value
            for name, value in self.place.known().items()
        )

    def is_inside(self, other: "Reading") -> bool:
        """Say whether ``other`` started one launcher a node and this is that one."""
        place = self.place
        node = (place.node_rank, place.num_nodes)
        if place.num_nodes is None:
            node = (place.cross_rank, place.cross_size)
        return None not in node and node == (other.place.rank, other.place.size)


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Read a variable that must be a count or an index; None where it is unset.

    Raises:
        WorldError: It is no integer of at least 0.
    """
    text = environ.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text.strip(), re.ASCII) is None:
        raise WorldError(
            f"{name} must be an integer of at least 0, got {text!r}. "
            f"Correct it, or unset it to run a world of one."
        )
    return int(text)


def check_place(place: Place, names: Mapping[str, str]) -> None:
    """Refuse numbers that cannot all be true.

    Args:
        place: The numbers.
        names: The variable that each attribute of ``place`` was read from.

    Raises:
        WorldError: An index is not below its count, or a count is above the size.
    """
    known = place.known()
    for _, count in INDEX_AND_COUNT:
        if known.get(count) == 0:
            raise WorldError(
                f"{names[count]} must be at least 1, got 0. "
                f"Set it anew, or unset it to run a world of one."
            )
    for low, rule, high in _ORDER:
        limit = known.get(high)
        if limit is not None and known.get(low, 0) >= limit + (rule == "at most"):
            _refuse(known, names, low, rule, high)
    if known.keys() >= {"size", "local_size", "num_nodes"}:
        _check_every_node_has_a_rank(known, names)


def _check_every_node_has_a_rank(
    known: Mapping[str, int], names: Mapping[str, str]
) -> None:
    local_size, num_nodes = known["local_size"], known["num_nodes"]
    if num_nodes == 1 and known["size"] != local_size:
        rule = f"equal where {names['num_nodes']}=1 to"
        _refuse(known, names, "local_size", rule, "size")
    least = local_size + num_nodes - 1
    if known["size"] < least:
        raise WorldError(
            f"{names['size']} must be at least {names['local_size']} + "
            f"{names['num_nodes']} - 1 = {local_size} + {num_nodes} - 1 = {least}, "
            f"got {known['size']}. Set the variables anew, all from one launcher."
        )


def _refuse(
    known: Mapping[str, int], names: Mapping[str, str], low: str, rule: str, high: str
) -> None:
    raise WorldError(
        f"{names[low]} must be {rule} {names[high]}, got {names[low]}={known[low]} "
        f"and {names[high]}={known[high]}. "
        f"Set the variables anew, all from one launcher."
    )
