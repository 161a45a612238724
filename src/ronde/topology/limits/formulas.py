"""Limits that physics sets to busbw, as formulas; see docs/bench-limits.md.

Pure, and without torch. All rates are of one direction in GB/s, 1e9 bytes/s. Nodes are
alike, and n ranks lie in order on N of them, g on each.

Source: bytes that must cross a node's edge, leave a GPU, or be read and written in
memory, whatever the algorithm.
"""

from dataclasses import dataclass

TO_ALL = ("all_reduce", "all_gather", "reduce_scatter")
"""All ranks have a part in all of the result; a ring can do these."""

_PAIRWISE = ("alltoall", "alltoallv")
_FROM_ROOT = ("broadcast", "reduce")
_SPLIT_BY_ROOT = ("scatter", "gather")

COLLECTIVES = (
    *TO_ALL,
    *_FROM_ROOT,
    *_PAIRWISE,
    *_SPLIT_BY_ROOT,
    "sendrecv",
    "hypercube",
)
"""Those that have formulas, as ``ronde bench`` spells them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks are.

    Attributes:
        num_ranks: n, at least 2.
        num_nodes: N, at least 1.
        ranks_per_node: g; the largest where nodes differ.
    """

    num_ranks: int
    num_nodes: int
    ranks_per_node: int

    @property
    def others(self) -> float:
        """(n-1)/n: the share of the data that is not a rank's own."""
        return (self.num_ranks - 1) / self.num_ranks

    @property
    def other_nodes(self) -> float:
        """(N-1)/N: the share of the data that is not a node's own."""
        return (self.num_nodes - 1) / self.num_nodes


def network_bound(
    test: str,
    layout: Layout,
    node_gb_per_s: float,
    *,
    is_reduced_in_network: bool = False,
) -> float:
    """Return what the links between nodes allow.

    Args:
        test: One of ``COLLECTIVES``.
        layout: At least 2 nodes.
        node_gb_per_s: All network links of a node together; for sendrecv the best one.
        is_reduced_in_network: The switches reduce (SHARP).

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    if test == "all_reduce" and is_reduced_in_network:
        return node_gb_per_s * 2 * layout.others
    share = layout.others / layout.other_nodes
    bounds = {
        **dict.fromkeys((*TO_ALL, *_SPLIT_BY_ROOT), node_gb_per_s * share),
        **dict.fromkeys(_PAIRWISE, node_gb_per_s / g * share),
        **dict.fromkeys(_FROM_ROOT, node_gb_per_s),
        "hypercube": node_gb_per_s / g * (n - 1) / (n - g),
        "sendrecv": node_gb_per_s,
    }
    return bounds[test]


def ring_bound(node_gb_per_s: float) -> float:
    """Return what a pure ring over the network reaches; trees may exceed it."""
    return node_gb_per_s


def gpu_bound(test: str, layout: Layout, gpu_gb_per_s: float) -> float:
    """Return what the way out of each GPU allows within a node, without NVLS.

    Args:
        test: One of ``COLLECTIVES``.
        layout: At least 2 ranks on a node, each with a GPU of its own.
        gpu_gb_per_s: All NVLinks of a GPU together, or its PCIe link.

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    bounds = {
        **dict.fromkeys(TO_ALL, gpu_gb_per_s * layout.others * g / (g - 1)),
        **dict.fromkeys(_FROM_ROOT, gpu_gb_per_s),
        **dict.fromkeys(_SPLIT_BY_ROOT, gpu_gb_per_s),
        **dict.fromkeys(_PAIRWISE, gpu_gb_per_s * (n - 1) / (g - 1)),
        "sendrecv": gpu_gb_per_s,
        "hypercube": gpu_gb_per_s * (n - 1) / (g - 1),
    }
    return bounds[test]


def nvls_bound(
    layout: Layout, gpu_gb_per_s: float, *, counts_write_back: bool = True
) -> float:
    """Return what all_reduce may reach when the NVLink switches reduce (NVLS).

    Args:
        layout: Where the ranks are.
        gpu_gb_per_s: All NVLinks of a GPU together.
        counts_write_back: A GPU also sends its share of the result to the switch.
    """
    g = layout.ranks_per_node
    bound = gpu_gb_per_s * 2 * layout.others
    return bound * g / (g + 1) if counts_write_back else bound


def memory_bound(test: str, layout: Layout, memory_gb_per_s: float) -> float:
    """Return what a node's memory allows.

    Every byte of input is read at least once and every byte of result written, on the
    node with the most of both; in place, what is already there is not written.

    Args:
        test: One of ``COLLECTIVES``.
        layout: Where the ranks are; all on one node in the usual case.
        memory_gb_per_s: What the node reads and writes together, sustained.

    Raises:
        KeyError: The test is none of them.
    """
    n, g = layout.num_ranks, layout.ranks_per_node
    # By test, busbw over the bytes read and written, both by size over time.
    shares = {
        "all_reduce": (n - 1) / (n * g),
        "all_gather": (n - 1) / (n * g),
        "hypercube": (n - 1) / (n * g),
        "reduce_scatter": (n - 1) / (g * (n + 1)),
        "broadcast": 1 / g,
        "reduce": 1 / (g + 1),
        "alltoall": 1 / (2 * g),
        "alltoallv": 1 / (2 * g),
        "scatter": (n - 1) / (n + g - 2),
        "gather": (n - 1) / (n + g - 2),
        "sendrecv": 1 / (2 * g),
    }
    return memory_gb_per_s * shares[test]
