"""Prices of collectives: the time of a schedule's loads over the links of a cluster.

Ranks are in node order. Costs may be arrays, such as draws of an unknown latency; they
broadcast, and so do prices. ``docs/algorithms.md`` explains the model.

Source: Hockney's model, with a cost of reductions as in Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.collectives import algorithms
from ronde.collectives.algorithms import ALGORITHMS, Chunks, Load, Schedule
from ronde.errors import UsageError
from ronde.parallel.layout import RankLayout

Seconds = float | NDArray[np.float64]

ALL_REDUCES = (*ALGORITHMS, "two_levels", "parameter_server", "in_network", "nccl")
_NCCL_PIECE_BYTES = 512 << 10  # its buffer of 4 MiB is used in 8 parts
# A node's bytes in a tree, relative to those of its busiest rank, if rounds overlap.
_NUM_ROLES = 1.5


class LinkCost(NamedTuple):
    """The cost of messages over one link."""

    alpha_s: Seconds  # a message
    beta_s_per_byte: Seconds  # a byte sent
    gamma_s_per_byte: Seconds = 0.0  # a byte reduced


class LinkCosts(NamedTuple):
    """The costs inside a node and between nodes, and the leaf switches of nodes."""

    inside: LinkCost
    between: LinkCost  # over all adapters of a node
    oversubscription: Seconds = 1.0  # rate below a leaf switch, relative to that above
    nodes_per_leaf: int = 0  # 0: one switch joins all nodes

    def at_once(self, num_ranks: int) -> "LinkCosts":
        """Return the costs if so many ranks of each node use its adapters at once."""
        beta = num_ranks * self.between.beta_s_per_byte
        return self._replace(between=self.between._replace(beta_s_per_byte=beta))


def price(
    schedule: Schedule,
    layout: RankLayout,
    costs: LinkCosts,
    itemsize: int = 4,
    piece_bytes: int = 0,
) -> Seconds:
    """Return the duration of a schedule.

    ``piece_bytes`` is the length of the overlapping pieces into which the engine
    ``scheduled`` cuts chunks; 0 for whole chunks.
    """
    # A fraction, so that prices have no steps.
    chunk_bytes = schedule.chunks.largest() * itemsize
    num_pieces = max(1.0, chunk_bytes / (piece_bytes or math.inf))
    if num_pieces == 1 or not schedule.overlapping:
        return _loads_s(schedule.loads, layout, costs, itemsize)
    piece = itemsize / num_pieces
    first_s = _loads_s(schedule.loads, layout, costs, piece)
    further_s = _loads_s(schedule.overlapping, layout, costs, piece, _NUM_ROLES)
    return first_s + (num_pieces - 1) * further_s


def all_reduce_s(
    algorithm: str,
    num_bytes: float,
    layout: RankLayout,
    costs: LinkCosts,
    piece_bytes: int = 0,
) -> Seconds:
    """Return the duration of an all_reduce; 0 for one rank.

    ``algorithm`` is one of ``ALL_REDUCES``: ``two_levels`` is the engine
    ``hierarchical``, ``parameter_server`` has a server on each node, ``in_network``
    reduces in the switches between nodes, and ``nccl`` is the faster of its ring and
    its tree. ``piece_bytes`` is as in ``price``; two levels cut the whole vector.

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
        push = Load(1, size, layout.num_nodes, is_reduced=True)
        loads = push, push._replace(is_reduced=False)
        return _loads_s(loads, _between(layout), costs)
    if algorithm == "nccl":
        ring_s = price(algorithms.ring_all_reduce(n, size), layout, costs, 1)
        tree_s = _nccl_tree_s(size, layout, costs, piece_bytes or _NCCL_PIECE_BYTES)
        return np.minimum(ring_s, tree_s)
    return _two_levels_s(algorithm, size, layout, costs, piece_bytes)


def _two_levels_s(
    algorithm: str, size: int, layout: RankLayout, costs: LinkCosts, piece_bytes: int
) -> Seconds:
    _, num_nodes, g = layout
    piece = min(size, piece_bytes or size)
    if layout.num_ranks == num_nodes * g:
        chunks, num_at_once = Chunks(g, piece), g
        scatter = algorithms.ring_reduce_scatter(chunks)
        inside = *scatter.loads, *algorithms.ring_all_gather(chunks).loads
    else:  # one rank of each node exchanges all
        spread, num_at_once = algorithms.ring_broadcast(g, piece, 0), 1
        inside = *algorithms.ring_all_reduce(g, piece).loads, *spread.loads
    if algorithm == "in_network" and num_nodes > 1:
        # Up to the switches and down at the same time: bytes as in one round.
        loads, num_at_once = (Load(2, math.ceil(piece / 2)),), 1
    else:
        share = math.ceil(piece / num_at_once)
        loads = algorithms.ring_all_reduce(num_nodes, share).loads
    inside_s = _loads_s(inside, _inside(layout), costs)
    between_s = _loads_s(loads, _between(layout), costs.at_once(num_at_once))
    # One thread runs both steps inside a node; exchanges between nodes are in turn.
    further_s = np.maximum(inside_s, between_s)
    num_pieces = max(1.0, size / (piece_bytes or math.inf))
    return inside_s + between_s + (num_pieces - 1) * further_s


def _nccl_tree_s(
    size: int, layout: RankLayout, costs: LinkCosts, piece_bytes: int
) -> Seconds:
    """Price two trees of the nodes, and a chain of the ranks of each node."""
    piece, between = min(size, piece_bytes), _between(layout)
    tree = algorithms.tree_all_reduce(layout.num_nodes, piece)
    hop = Load(1, piece, is_reduced=True), Load(1, piece)
    hop_s = _loads_s(hop, _inside(layout), costs)
    num_hops = layout.ranks_per_node - 1
    first_s = num_hops * hop_s + _loads_s(tree.loads, between, costs)
    further_s = _loads_s(tree.overlapping, between, costs)
    further_s = np.maximum(min(1, num_hops) * hop_s, further_s)
    return first_s + (max(1.0, size / piece_bytes) - 1) * further_s


def _inside(layout: RankLayout) -> RankLayout:
    return RankLayout(layout.ranks_per_node, 1, layout.ranks_per_node)


def _between(layout: RankLayout) -> RankLayout:
    return RankLayout(layout.num_nodes, layout.num_nodes, 1)


def _loads_s(
    loads: Sequence[Load],
    layout: RankLayout,
    costs: LinkCosts,
    itemsize: float = 1,
    num_roles: float = 1,
) -> Seconds:
    _, num_nodes, g = layout
    per_leaf = costs.nodes_per_leaf
    has_leaves = 0 < per_leaf < num_nodes
    # Loads with equal numbers of ranks on the same links are priced together.
    totals = defaultdict[tuple[float, float], list[float]](lambda: [0, 0, 0])
    for load in loads:
        crossing = load.num_crossing(g) if num_nodes > 1 else 0
        leaving = load.num_crossing(g * per_leaf) if crossing and has_leaves else 0
        roles = num_roles if load.is_sparse and g > 1 else 1
        total = totals[roles * crossing, leaving / max(1, per_leaf)]
        num_bytes = load.num_rounds * load.numel * itemsize
        total[0] += load.num_rounds
        total[1] += num_bytes
        total[2] += num_bytes * load.is_reduced
    seconds: Seconds = 0.0
    for (crossing, leaving), (num_rounds, num_bytes, num_reduced) in totals.items():
        link = costs.between if crossing else costs.inside
        lines = np.maximum(crossing, leaving * costs.oversubscription)
        line_beta = lines * costs.between.beta_s_per_byte
        beta = np.maximum(line_beta, costs.inside.beta_s_per_byte)
        seconds = seconds + num_rounds * link.alpha_s + num_bytes * beta
        seconds = seconds + num_reduced * link.gamma_s_per_byte
    return seconds
