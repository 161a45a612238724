"""Which engine and algorithm a collective takes: a table, by rules or by measurement.

All ranks must choose alike, or they wait for each other for ever. So a choice depends
on nothing that differs between ranks: on the size only for collectives whose tensors
are equal on all ranks, and on a table that all ranks have.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ronde.units import format_size

SIZED = ("all_reduce", "reduce_scatter", "broadcast")
"""Collectives whose tensors are equally large on all ranks."""
UNSIZED = ("all_gather", "all_to_all", "send", "recv", "barrier")
"""The others: one choice for every size."""
COLLECTIVES = SIZED + UNSIZED

CLASS_LIMITS_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
"""The largest size of every class but the last, which has no largest."""
CLASS_SAMPLES_BYTES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 32 << 20)
"""The size by which a class is measured."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves the bytes of a collective.

    Attributes:
        engine: One of ``ronde.world.environment.ENGINES``, but not ``auto``.
        algorithm: The schedule, where the engine has several; or empty.
        reason: Why, in one clause.
    """

    engine: str
    algorithm: str = ""
    reason: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return ``engine`` or ``engine/algorithm``."""
        return f"{self.engine}/{self.algorithm}" if self.algorithm else self.engine

    @classmethod
    def of(cls, label: str, reason: str = "") -> "Choice":
        """Read what ``str()`` writes."""
        engine, _, algorithm = label.partition("/")
        return cls(engine, algorithm, reason)


@dataclass(frozen=True, slots=True)
class Table:
    """What each collective takes, on tensors of the CPU, by size.

    Attributes:
        choices: For each collective one choice a size class, or one for all sizes.
        source: Where the table comes from, in one clause.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    source: str

    def choose(
        self, collective: str, num_bytes: int | None, device_type: str
    ) -> Choice:
        """Return what a collective takes.

        Args:
            collective: One of ``COLLECTIVES``.
            num_bytes: Of the tensor given; it counts for ``SIZED`` alone. None where
                the ranks' may differ.
            device_type: As ``tensor.device.type``.
        """
        if device_type != "cpu":
            return Choice("nccl", reason="tensors of an accelerator are NCCL's")
        by_class = self.choices[collective]
        return by_class[min(size_class(num_bytes or 0), len(by_class) - 1)]


def size_class(num_bytes: int) -> int:
    """Return the index of the class that a size falls into."""
    return bisect_left(CLASS_LIMITS_BYTES, num_bytes)


def default_table(ranks_per_host: Sequence[int]) -> Table:
    """Return what is sane where nothing was measured.

    Args:
        ranks_per_host: Number of ranks of each host.
    """
    if len(ranks_per_host) == 1:
        shared = Choice("shared_memory", reason="all ranks share this host's memory")
        return Table(dict.fromkeys(COLLECTIVES, (shared,)), "rules for one host")
    if max(ranks_per_host) == 1:
        flat = Choice("gloo", reason="every rank has a host of its own")
        return Table(dict.fromkeys(COLLECTIVES, (flat,)), "rules for several hosts")
    flat = Choice("gloo", reason="two levels bring it nothing")
    small = Choice("gloo", reason="small messages: one step beats two levels")
    large = Choice("hierarchical", reason="each byte crosses the network once a host")
    two_levels = (small, *(large for _ in CLASS_LIMITS_BYTES))
    choices: dict[str, tuple[Choice, ...]] = dict.fromkeys(UNSIZED, (flat,))
    choices.update((name, two_levels) for name in SIZED)
    return Table(choices, "rules for several hosts of several ranks")


def explain(table: Table) -> str:
    """Say in lines what each collective takes, and why."""
    lines = [f"auto chooses by {table.source}:"]
    for name in COLLECTIVES:
        by_class = table.choices[name]
        first = 0
        for index, choice in enumerate(by_class):
            last = index + 1 == len(by_class)
            # Classes of one choice for one reason are one line.
            if not last and _is_same(by_class[index + 1], choice):
                continue
            sizes = _sizes(first, None if last else index)
            lines.append(f"  {name:<15}{sizes:<20}{choice!s:<24}{choice.reason}")
            first = index + 1
    lines.append(f"  {'accelerators':<15}{'every size':<20}nccl")
    return "\n".join(lines)


def _is_same(one: Choice, other: Choice) -> bool:
    return one == other and one.reason == other.reason


def _sizes(first: int, last: int | None) -> str:
    """Name the classes from one to another; None is the last there is."""
    above = format_size(CLASS_LIMITS_BYTES[first - 1]) if first else ""
    if last is None:
        return f"above {above}" if above else "every size"
    up_to = f"to {format_size(CLASS_LIMITS_BYTES[last])}"
    return f"{above} {up_to}" if above else f"up {up_to}"
