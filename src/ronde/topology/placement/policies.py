"""Hints of several resources, merged into one set of memory nodes, and admitted or not.

The rules are those of Kubernetes' TopologyManager: a plan made here is what a cluster
under the same policy would do. A set of nodes is the bits of a number; bit 0 is the
first node that has CPUs, whatever the kernel calls it. Nodes without CPUs have no bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Policy(StrEnum):
    """What becomes of a request that cannot be aligned."""

    NONE = "none"  # Nothing is aligned and everything admitted.
    BEST_EFFORT = "best-effort"  # Aligned as well as can be, and admitted.
    RESTRICTED = "restricted"  # Refused unless all comes from the same, fewest nodes.
    SINGLE_NUMA_NODE = "single-numa-node"  # Refused unless all comes from one node.


class Hint(NamedTuple):
    """One way to meet a request for one resource."""

    mask: int | None  # Nodes that it takes; None where any will do.
    is_preferred: bool  # Whether no smaller set could ever do.


ANY = (Hint(None, is_preferred=True),)
"""The hints of a resource without preference."""

NOWHERE = (Hint(None, is_preferred=False),)
"""The hints of a request that no nodes can meet."""


class Alignment(NamedTuple):
    """What becomes of a request."""

    mask: int | None  # Nodes to use; None for any.
    is_preferred: bool
    is_admitted: bool


def counted_hints(
    total: Sequence[int], free: Sequence[int], quantity: int
) -> tuple[Hint, ...]:
    """Return a hint for each set of nodes that can meet a request now.

    Preferred are the smallest that could meet it if all were free: what others have
    scattered is no excuse. ``total`` and ``free`` are by bit of the node.
    """
    had, left = ([0], [0])
    for sums, counts in ((had, total), (left, free)):
        for count in counts:
            sums += [each + count for each in sums]
    masks = range(1, len(had))
    smallest = min((m.bit_count() for m in masks if had[m] >= quantity), default=0)
    able = (mask for mask in masks if left[mask] >= quantity)
    return tuple(Hint(mask, mask.bit_count() == smallest) for mask in able)


def decide(
    policy: Policy, resources: Sequence[Sequence[Hint]], all_mask: int
) -> Alignment:
    """Return what a policy makes of the hints of each resource, in any order.

    ``all_mask`` has all nodes with CPUs.
    """
    if policy is Policy.NONE:
        return Alignment(None, is_preferred=True, is_admitted=True)
    if policy is Policy.SINGLE_NUMA_NODE:
        single = [
            [h for h in hints if h.is_preferred and (h.mask or 1).bit_count() == 1]
            for hints in resources
        ]
        mask, is_preferred = merge(single, all_mask)
        limited = None if mask == all_mask else mask
        return Alignment(limited, is_preferred, is_preferred)
    mask, is_preferred = merge(resources, all_mask)
    return Alignment(mask, is_preferred, is_preferred or policy is Policy.BEST_EFFORT)


def merge(resources: Sequence[Sequence[Hint]], all_mask: int) -> Hint:
    """Return the best of all combinations of one hint a resource.

    A combination takes the nodes that all its hints have in common, and is preferred
    when all are and name the same nodes. Eight nodes and four resources have billions
    of combinations: only what some of them have in common is listed.
    """
    preferred = _agreed_masks(resources, all_mask)
    count = best_count(resources)
    best: Hint | None = None
    for mask in preferred or _common_masks(resources, all_mask):
        best = compare(best, Hint(mask, bool(preferred)), count)
    return best or Hint(all_mask, is_preferred=False)


def compare(current: Hint | None, candidate: Hint, count: int) -> Hint | None:
    """Return the better of two combinations; the first where equally good.

    ``count`` is that of ``best_count``: not preferred sets are best when they have this
    size, for a smaller one lacks what some resource needs.
    """

    def rank(hint: Hint) -> tuple[int, int, int, int]:
        mask = hint.mask or 0
        size = mask.bit_count()
        if hint.is_preferred:
            return (0, 0, size, mask)
        return (1 if size <= count else 2, max(0, count - size), size, mask)

    if not candidate.mask:
        return current
    is_better = current is None or rank(candidate) < rank(current)
    return candidate if is_better else current


def best_count(resources: Iterable[Iterable[Hint]]) -> int:
    """Return the largest, over resources, of the sizes of their narrowest masks."""
    masks = ([h.mask for h in hints if h.mask is not None] for hints in resources)
    sizes = (min((mask.bit_count() for mask in each), default=0) for each in masks)
    return max(sizes, default=0)


def _agreed_masks(resources: Sequence[Sequence[Hint]], all_mask: int) -> set[int]:
    wanted = [{hint.mask for hint in hints if hint.is_preferred} for hints in resources]
    named = {mask for masks in wanted for mask in masks if mask}
    agreed = {mask for mask in named if all(mask in w or None in w for w in wanted)}
    return agreed | {all_mask} if all(None in masks for masks in wanted) else agreed


def _common_masks(resources: Sequence[Sequence[Hint]], all_mask: int) -> set[int]:
    """Return what the hints of each combination have in common, in ``n 2**n`` steps."""
    # The number of combinations that have at least some nodes in common is a product
    # over the resources; of those that have just these, its differences.
    ways = [1] * (all_mask + 1)
    for hints in resources:
        counts = [0] * len(ways)
        for hint in hints:
            counts[all_mask if hint.mask is None else hint.mask] = 1
        for low, high in _pairs(all_mask):
            counts[low] += counts[high]
        ways = [all_ways * count for all_ways, count in zip(ways, counts, strict=True)]
    for low, high in _pairs(all_mask):
        ways[low] -= ways[high]
    return {mask for mask, num_ways in enumerate(ways) if num_ways}


def _pairs(all_mask: int) -> Iterator[tuple[int, int]]:
    """Yield each set without a node and the same with it, node by node."""
    for bit in (1 << node for node in range(all_mask.bit_length())):
        yield from ((m, m | bit) for m in range(all_mask + 1) if not m & bit)
