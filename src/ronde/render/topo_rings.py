"""What NCCL's search has found, in words: rings, trees and what they should give."""

from collections.abc import Sequence

from ronde.topology.search_graph import SearchGraph


def tell_search(graphs: Sequence[SearchGraph]) -> str:
    """Return a block for each shape: its channels, and the orders they go in."""
    return "\n".join(_block(graph) for graph in graphs)


def _block(graph: SearchGraph) -> str:
    title = f"{graph.pattern_name} (graph {graph.id})"
    if not graph.num_channels:
        return f"{title}: none found\n"
    total = graph.num_channels * graph.intra_gb_per_s
    count = f"{graph.num_channels} channel{'' if graph.num_channels == 1 else 's'}"
    each = f"{graph.intra_gb_per_s:g} GB/s, {total:g} GB/s together"
    outside = f"{graph.inter_type} with {graph.inter_gb_per_s:g} GB/s a channel"
    lines = [
        f"{title}: {count} of {each}",
        f"  between GPUs {graph.intra_type}, to an adapter {outside}",
    ]
    orders: dict[str, int] = {}
    for channel in graph.channels:
        order = " ".join(channel)
        orders[order] = orders.get(order, 0) + 1
    for order, times in orders.items():
        lines.append(f"  {order}" + (f"   {times} times" if times > 1 else ""))
    return "\n".join(lines) + "\n"
