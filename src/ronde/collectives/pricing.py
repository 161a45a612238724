"""Prices of collectives: the time of a schedule's loads over the links of a cluster.

Ranks are in node order. Costs may be arrays, such as draws of an unknown latency; they
broadcast, and so do prices. ``docs/algorithms.md`` explains the model.

Source: Hockney's model, with a reduction cost as in Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.collectives.algorithms import (
    ALGORITHMS,
    Algorithm,
    Chunks,
    Load,
    Schedule,
    find_algorithm,
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
    tree_all_reduce,
)
from ronde.errors import UsageError
from ronde.parallel.layout import RankLayout

Seconds = float | NDArray[np.float64]

ALL_REDUCES = (
    *ALGORITHMS,
    "two_levels",
    "parameter_server",
    "in_network",
    "nccl",
)
"""Names that ``all_reduce_s`` takes."""

_NCCL_PIECE_BYTES = 512 << 10  # its buffer of 4 MiB is used in 8 parts
_MANY_ROLES = 1.5
"""A tree's bytes through the adapters of a node of several ranks, relative to those of
its busiest rank, if all rounds overlap."""


class LinkCost(NamedTuple):
    """The cost of messages over one link."""

    alpha_s: Seconds  # a message
    beta_s_per_byte: Seconds  # a byte sent
    gamma_s_per_byte: Seconds = 0.0  # a byte reduced


class LinkCosts(NamedTuple):
    """The costs inside a node and between nodes.

    ``between`` is of all adapters of a node together. Leaf switches join
    ``nodes_per_leaf`` nodes each, or all nodes if it is 0. Their links to other
    switches are ``oversubscription`` times slower than those to their nodes.
    """

    inside: LinkCost
    between: LinkCost
    oversubscription: Seconds = 1.0
    nodes_per_leaf: int = 0


def price(
    schedule: Schedule,
    layout: RankLayout,
    costs: LinkCosts,
    itemsize: int = 4,
    piece_bytes: int = 0,
) -> Seconds:
    """Return the duration of a schedule on ranks in node order.

    ``piece_bytes`` is the length of the pieces into which chunks are cut, as the engine
    ``scheduled`` does; 0 if they are not.
    """
    chunk_bytes = schedule.chunks.largest() * itemsize
    if not schedule.overlapping or chunk_bytes <= piece_bytes or not piece_bytes:
        return _loads_s(schedule.loads, layout, costs, itemsize)
    num_pieces = chunk_bytes / piece_bytes  # a fraction, so that prices have no steps
    piece = itemsize / num_pieces
    first_s = _loads_s(schedule.loads, layout, costs, piece)
    further_s = _further_s(schedule, layout, costs, piece)
    return first_s + (num_pieces - 1) * further_s


def all_reduce_s(
    algorithm: str,
    num_bytes: float,
    layout: RankLayout,
    costs: LinkCosts,
    piece_bytes: int = 0,
) -> Seconds:
    """Return the duration of an all_reduce; 0 for one rank.

    Args:
        algorithm: One of ``ALL_REDUCES``. ``two_levels`` is the engine
            ``hierarchical``; ``parameter_server`` has a server on each node;
            ``in_network`` reduces in the switches between nodes; ``nccl`` is the faster
            of its ring and its tree.
        num_bytes: The length of the vector.
        layout: The ranks; nodes may differ.
        costs: The costs of the links.
        piece_bytes: The length of pieces that overlap: of a chunk in a schedule, of the
            vector otherwise. 0 is one piece, but NCCL's own size in ``nccl``.

    Raises:
        UsageError: The algorithm is unknown.
    """
    if algorithm not in ALL_REDUCES:
        raise UsageError(
            f"algorithm must be one of {', '.join(ALL_REDUCES)}, got {algorithm!r}."
        )
    n, size = layout.num_ranks, math.ceil(num_bytes)
    if n == 1:
        return 0.0
    if algorithm in ALGORITHMS:
        schedule = ALGORITHMS[algorithm].all_reduce(n, size)
        return price(schedule, layout, costs, 1, piece_bytes)
    if algorithm == "parameter_server":
        # All nodes send to all at once, so that all bytes leave a leaf.
        exchange = Load(1, size, layout.num_nodes, is_reduced=True)
        loads = exchange, exchange._replace(is_reduced=False)
        return _loads_s(loads, _between(layout), costs, 1)
    if algorithm == "nccl":
        ring_s = price(ring_all_reduce(n, size), layout, costs, 1)
        tree_s = _nccl_tree_s(size, layout, costs, piece_bytes or _NCCL_PIECE_BYTES)
        return np.minimum(ring_s, tree_s)
    is_in_network = algorithm == "in_network"
    return _two_levels_s(size, layout, costs, piece_bytes, is_in_network=is_in_network)


def reduce_scatter_s(
    algorithm: str, num_bytes: float, layout: RankLayout, costs: LinkCosts
) -> Seconds:
    """Return the duration of a reduce_scatter of a vector of ``num_bytes``.

    Args:
        algorithm: One of ``ALGORITHMS``, ``two_levels`` or ``nccl``, which is a ring.
        num_bytes: The length of the vector.
        layout: The ranks, equally many on each node.
        costs: The costs of the links.

    Raises:
        UsageError: The algorithm is unknown.
    """
    return _shares_s(algorithm, lambda a: a.reduce_scatter, num_bytes, layout, costs)


def all_gather_s(
    algorithm: str, num_bytes: float, layout: RankLayout, costs: LinkCosts
) -> Seconds:
    """Return the duration of an all_gather into a vector of ``num_bytes``.

    Otherwise as ``reduce_scatter_s``.
    """
    return _shares_s(algorithm, lambda a: a.all_gather, num_bytes, layout, costs)


def _shares_s(
    algorithm: str,
    collective: Callable[[Algorithm], Callable[[Chunks], Schedule]],
    num_bytes: float,
    layout: RankLayout,
    costs: LinkCosts,
) -> Seconds:
    size, g = math.ceil(num_bytes), layout.ranks_per_node
    is_ring = algorithm in ("two_levels", "nccl")
    make = collective(find_algorithm("ring" if is_ring else algorithm))
    if algorithm != "two_levels":
        return price(make(Chunks(layout.num_ranks, size)), layout, costs, 1)
    share = Chunks(layout.num_nodes, math.ceil(size / g))
    return price(make(Chunks(g, size)), _inside(layout), costs, 1) + price(
        make(share), _between(layout), _at_once(g, costs), 1
    )


def _two_levels_s(
    size: int,
    layout: RankLayout,
    costs: LinkCosts,
    piece_bytes: int,
    *,
    is_in_network: bool,
) -> Seconds:
    piece, g = min(size, piece_bytes or size), layout.ranks_per_node
    if layout.num_ranks == layout.num_nodes * g:
        chunks = Chunks(g, piece)
        local = ring_reduce_scatter(chunks), ring_all_gather(chunks)
        num_at_once = g
    else:  # one rank of each node exchanges all
        local = ring_all_reduce(g, piece), ring_broadcast(g, piece, 0)
        num_at_once = 1
    inside_s = sum(price(each, _inside(layout), costs, 1) for each in local)
    if is_in_network and layout.num_nodes > 1:
        # Up to the switches and down at the same time: bytes as in one round.
        loads = (Load(2, math.ceil(piece / 2)),)
        between_s = _loads_s(loads, _between(layout), costs, 1)
    else:
        ring = ring_all_reduce(layout.num_nodes, math.ceil(piece / num_at_once))
        between_s = price(ring, _between(layout), _at_once(num_at_once, costs), 1)
    # One thread runs both steps inside a node; exchanges between nodes are in turn.
    further_s = np.maximum(inside_s, between_s)
    return inside_s + between_s + _num_further(size, piece) * further_s


def _nccl_tree_s(
    size: int, layout: RankLayout, costs: LinkCosts, piece_bytes: int
) -> Seconds:
    """Price two trees of the nodes, and a chain of the ranks of each node."""
    piece = min(size, piece_bytes)
    inside, between = _inside(layout), _between(layout)
    tree = tree_all_reduce(layout.num_nodes, piece)
    hop = Load(1, piece, is_reduced=True), Load(1, piece)
    hop_s = _loads_s(hop, inside, costs, 1)
    tree_s = _loads_s(tree.loads, between, costs, 1)
    first_s = (layout.ranks_per_node - 1) * hop_s + tree_s
    further_s = _further_s(tree, between, costs, 1)
    if layout.ranks_per_node > 1:
        further_s = np.maximum(hop_s, further_s)
    return first_s + _num_further(size, piece) * further_s


def _num_further(size: int, piece: int) -> float:
    """Return the number of pieces after the first; a fraction, as in ``price``."""
    return size / piece - 1 if piece else 0.0


def _inside(layout: RankLayout) -> RankLayout:
    return RankLayout(layout.ranks_per_node, 1, layout.ranks_per_node)


def _between(layout: RankLayout) -> RankLayout:
    return RankLayout(layout.num_nodes, layout.num_nodes, 1)


def _at_once(num_ranks: int, costs: LinkCosts) -> LinkCosts:
    """Return the costs if so many ranks of each node use its adapters at once."""
    beta = num_ranks * costs.between.beta_s_per_byte
    return costs._replace(between=costs.between._replace(beta_s_per_byte=beta))


def _further_s(
    schedule: Schedule, layout: RankLayout, costs: LinkCosts, itemsize: float
) -> Seconds:
    """Return the time of each further piece, while all rounds overlap."""
    return _loads_s(schedule.overlapping, layout, costs, itemsize, _MANY_ROLES)


def _loads_s(
    loads: Sequence[Load],
    layout: RankLayout,
    costs: LinkCosts,
    itemsize: float,
    num_roles: float = 1.0,
) -> Seconds:
    _, num_nodes, g = layout
    num_leaf = costs.nodes_per_leaf
    has_leaves = 0 < num_leaf < num_nodes
    # Loads with equal numbers of ranks on the same links are priced together.
    totals = defaultdict[tuple[float, int], list[float]](lambda: [0, 0, 0])
    for load in loads:
        crossing = load.num_crossing(g) if num_nodes > 1 else 0
        leaving = load.num_crossing(g * num_leaf) if crossing and has_leaves else 0
        roles = num_roles if load.stride > 1 and g > 1 else 1.0
        total = totals[roles * crossing, leaving]
        numel = load.num_rounds * load.numel
        total[0] += load.num_rounds
        total[1] += numel * itemsize
        total[2] += numel * itemsize * load.is_reduced
    seconds: Seconds = 0.0
    for (crossing, leaving), (num_rounds, num_bytes, num_reduced) in totals.items():
        link = costs.between if crossing else costs.inside
        beta = costs.inside.beta_s_per_byte
        if crossing:
            lines = np.maximum(
                crossing, leaving * costs.oversubscription / max(1, num_leaf)
            )
            beta = np.maximum(lines * link.beta_s_per_byte, beta)
        seconds = seconds + (
            num_rounds * link.alpha_s
            + num_bytes * beta
            + num_reduced * link.gamma_s_per_byte
        )
    return seconds
