"""How near two devices are, by the bridges above each."""

from collections.abc import Sequence

from ronde.topology.machine import UNKNOWN_NODE
from ronde.topology.placement.supply import Nearness

_AT_ONE_SWITCH = 1


def bus_nearness(
    first: Sequence[str], second: Sequence[str], nodes: tuple[int, int]
) -> Nearness | None:
    """Return how near two devices are; None where nothing is known of one.

    Nearest is what shares most bridges, then what is near the same memory. The words
    are those of ``nvidia-smi topo``.

    Args:
        first: Host bridge, bridges and one device, from the top; empty if not known.
        second: Those of the other.
        nodes: The memory node of each, or ``UNKNOWN_NODE``.
    """
    num_shared = _num_shared(first, second)
    if num_shared == 0 and UNKNOWN_NODE in nodes:
        return None
    is_far = nodes[0] != nodes[1]
    word = "SYS" if is_far else "NODE"
    if num_shared == 1:
        word = "PHB"
    elif num_shared > 1:
        num_bridges = max(len(path) - num_shared - 1 for path in (first, second))
        word = "PIX" if num_bridges <= _AT_ONE_SWITCH else "PXB"
    return Nearness((-num_shared, is_far), word)


def _num_shared(first: Sequence[str], second: Sequence[str]) -> int:
    count = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs or not ours:
            break
        count += 1
    return count
