"""Even parts of cores: of those near each rank's GPU, else of all."""

from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.machine import UNKNOWN_NODE, Core


class Part(NamedTuple):
    """Cores that some ranks divide among them.

    Attributes:
        cores: By node and number.
        ranks: Who divides them, ascending.
        is_near_gpu: Whether they are those near the GPUs of these ranks.
    """

    cores: tuple[Core, ...]
    ranks: tuple[int, ...]
    is_near_gpu: bool


class Share(NamedTuple):
    """What one rank gets of a part.

    Attributes:
        part: What is divided.
        cores: Its own; all of the part where these are fewer than ranks.
        home: The memory node in the middle of what it gets.
        has_enough: Whether it need not share them; of no cores everybody has enough.
    """

    part: Part
    cores: tuple[Core, ...]
    home: int
    has_enough: bool


def share_cores(cores: tuple[Core, ...], homes: Sequence[int]) -> tuple[Share, ...]:
    """Divide cores among ranks in blocks, the low ranks' one core larger.

    Args:
        cores: By node and number.
        homes: The memory node near each rank's GPU, or ``UNKNOWN_NODE``: one such, or
            one without cores, and all cores are divided among all.
    """
    found: dict[int, Share] = {}
    for part in _parts(cores, homes):
        found |= dict(zip(part.ranks, _divided(part), strict=True))
    return tuple(found[rank] for rank in range(len(homes)))


def middle_node(cores: Sequence[Core]) -> int:
    """Return the memory node of the core in the middle, or ``UNKNOWN_NODE``."""
    return cores[(len(cores) - 1) // 2].node if cores else UNKNOWN_NODE


def _parts(cores: tuple[Core, ...], homes: Sequence[int]) -> list[Part]:
    ranks = range(len(homes))
    there = {core.node for core in cores} - {UNKNOWN_NODE}
    if not there.issuperset(homes):
        return [Part(cores, tuple(ranks), is_near_gpu=False)]
    return [
        Part(
            tuple(core for core in cores if core.node == node),
            tuple(rank for rank in ranks if homes[rank] == node),
            is_near_gpu=True,
        )
        for node in sorted(set(homes))
    ]


def _divided(part: Part) -> list[Share]:
    cores, num_ranks = part.cores, len(part.ranks)
    size, extra = divmod(len(cores), num_ranks)
    if not size:
        return [
            Share(part, cores, _node_at(cores, rank, num_ranks), not cores)
            for rank in range(num_ranks)
        ]
    starts = [n * size + min(n, extra) for n in range(num_ranks + 1)]
    blocks = [cores[starts[n] : starts[n + 1]] for n in range(num_ranks)]
    return [Share(part, block, middle_node(block), has_enough=True) for block in blocks]


def _node_at(cores: Sequence[Core], rank: int, num_ranks: int) -> int:
    """Return a memory node such that ranks are spread over all."""
    if not cores:
        return UNKNOWN_NODE
    return cores[(2 * rank + 1) * len(cores) // (2 * num_ranks)].node
