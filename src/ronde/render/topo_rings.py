"""What NCCL's search has found, in words: rings, trees and what they should give."""

from collections.abc import Sequence

from ronde.topology.search_graph import SearchGraph


def tell_search(graphs: Sequence[SearchGraph]) -> str:
    """Return a block for each shape: its channels, and the orders they go in."""
    return "\n".join(_block(graph) for graph in graphs)


def _block(graph: SearchGraph) -> str:
    total = graph.num_channels * graph.intra_gb_per_s
    channels = f"{graph.num_channels} channel{'' if graph.num_channels == 1 else 's'}"
    lines = [
        f"{graph.pattern_name} (graph {graph.id}): {channels} of "
        f"{graph.intra_gb_per_s:g} GB/s, {total:g} GB/s together",
        f"  between GPUs {graph.intra_type}, to an adapter {graph.inter_type} with "
        f"{graph.inter_gb_per_s:g} GB/s a channel",
    ]
    orders: dict[str, int] = {}
    for channel in graph.channels:
        order = " ".join(channel)
        orders[order] = orders.get(order, 0) + 1
    for order, times in orders.items():
        lines.append(f"  {order}" + (f"   {times} times" if times > 1 else ""))
    return "\n".join(lines) + "\n"
