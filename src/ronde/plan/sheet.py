"""Tables of published speeds: read, and completed with predictions."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from ronde.plan.setup import Cluster, Exchange, Overlap, Point, Program, Setup, Size

Cells = Mapping[str, str]
_NVLINK = {"v100": 110.0, "a100": 230.0, "h100": 360.0, "h200": 360.0, "p100": 60.0}


def number(cell: str) -> float | None:
    return float(cell) if cell else None


def size_of(row: Cells) -> Size:
    n = int(row["gpus"])
    nodes = int(row.get("nodes") or 1)
    batch = number(row.get("batch_a_gpu", ""))
    return Size(n, nodes, batch, number(row.get("accumulation", "")) or 1)


def overlap_of(method: str) -> Overlap | None:
    if method.startswith("BSP"):
        return Overlap.NONE
    if method.startswith("WFBP"):
        return Overlap.TENSOR
    return Overlap.BUCKET


def setup_of(rows: Sequence[Cells]) -> Setup:
    """Return the facts and the known speeds of a series."""
    row = rows[0]
    method, sharding = row.get("method", ""), row.get("sharding", "")
    exchange = Exchange.ALL_REDUCE
    if sharding == "FULL_SHARD":
        exchange = Exchange.SHARD_ALL
    elif sharding == "SHARD_GRAD_OP":
        exchange = Exchange.SHARD_GRADIENTS
    elif method.endswith("-PS") or "parameter server" in method:
        exchange = Exchange.PARAMETER_SERVER
    precision = row.get("precision", "")
    is_half = any(name in precision for name in ("16", "fp8"))
    program = Program(
        name=row.get("model", ""),
        unit=row.get("unit", "").removesuffix("/s"),
        units_a_sample=number(row.get("units_a_sample", ""))
        or (None if "tokens" in row.get("unit", "") else 1.0),
        num_parameters=number(row.get("parameters", "")),
        itemsize=2.0 if is_half else 4.0,
        overlap=overlap_of(method),
        exchange=exchange,
        is_accumulating=row.get("kind") == "accumulation",
    )
    gpu = row.get("gpu", "").lower()
    inside = None
    if "PCIe" not in row.get("intra_link", ""):
        inside = next((r for name, r in _NVLINK.items() if name in gpu), None)
        if inside is None and row.get("intra_gb_per_s"):
            inside = 0.75 * float(row["intra_gb_per_s"])
    cluster = Cluster(
        ranks_per_node=int(row.get("gpus_per_node") or 1),
        node_gbit_per_s=number(row.get("node_gbit_per_s", "")),
        transport=row.get("transport", ""),
        gpu_link_gb_per_s=inside,
    )
    points = sorted(
        Point(size_of(r), float(r["throughput"])) for r in rows if r["throughput"]
    )
    return Setup(program, cluster, tuple(points))
