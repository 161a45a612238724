"""Facts of programs and clusters as text, from options, files and changes."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ronde.arguments import nearest, one_of, whole_number
from ronde.collectives.pricing import ALL_REDUCES
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.plan.setup import Exchange, Overlap, Setup, Size
from ronde.units import parse_bit_per_s, parse_count, parse_size_bytes

_ITEMSIZES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
}
# PowerSGD of rank 4 on a large network, without the time of packing.
_COMPRESSIONS = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1 / 30}
_TRANSPORTS = {"tcp": "tcp", "rdma": "rdma", "roce": "rdma", "infiniband": "rdma"}
_FARTHEST_BATCH = 8
_LEAST_BUCKET = 1 << 16
LEAST, MOST = 1e-9, 1e15
"""Limits of all figures; beyond them predictions would overflow."""


def _read_mesh(text: str) -> Layout:
    mesh = Layout.parse(text)
    if mesh.cp != 1 or -1 in (mesh.tp, mesh.pp):
        raise UsageError(f"must have no cp, and numbers of tp and pp, got {mesh}.")
    return mesh


def read_pairs(text: str) -> dict[str, str]:
    parts = (pair.partition("=") for pair in text.split(","))
    return {key: value for key, _, value in parts}


def _read_bucket(text: str) -> int:
    size = parse_size_bytes(text)
    if size < _LEAST_BUCKET:
        raise UsageError(f"must be at least 64KiB, got {text!r}.")
    return size


def number_from(least: float = LEAST, most: float = MOST) -> Callable[[str], float]:
    """Return a reader of numbers from ``least`` to ``most``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            return value
        rule = "above 0" if least == LEAST else f"of at least {least:g}"
        raise UsageError(f"must be a number {rule} and at most {most:g}, got {text!r}.")

    return read


def _rate_in(bit_per_s: float) -> Callable[[str], float]:
    return lambda text: parse_bit_per_s(text) / bit_per_s


def _choice(values: Mapping[str, Any]) -> Callable[[str], Any]:
    return lambda text: values[one_of(*values)(text)]


class KnownFact(NamedTuple):
    """A fact that an option, a file or a change may state."""

    read: Callable[[str], Any]
    part: str  # of a setup
    field: str


FACTS: Mapping[str, KnownFact] = {
    "parameters": KnownFact(parse_count, "program", "num_parameters"),
    "dtype": KnownFact(_choice(_ITEMSIZES), "program", "itemsize"),
    "overlap": KnownFact(_choice({o: o for o in Overlap}), "program", "overlap"),
    "mesh": KnownFact(_read_mesh, "program", "mesh"),  # before exchange
    "blocks": KnownFact(whole_number(1), "program", "num_blocks"),
    "hidden": KnownFact(whole_number(1), "program", "hidden"),
    "sequence": KnownFact(number_from(1), "program", "sequence"),
    "microbatches": KnownFact(whole_number(1), "program", "microbatches"),
    "chunks": KnownFact(whole_number(1), "program", "chunks"),
    "period": KnownFact(number_from(1), "program", "period"),
    "exchange": KnownFact(_choice({e: e for e in Exchange}), "program", "exchange"),
    "algorithm": KnownFact(one_of(*ALL_REDUCES), "program", "algorithm"),
    "compression": KnownFact(_choice(_COMPRESSIONS), "program", "compression"),
    "bucket": KnownFact(_read_bucket, "program", "bucket_cap_bytes"),
    "compute": KnownFact(number_from(), "program", "compute_speed"),
    "jitter": KnownFact(number_from(0, 1), "program", "jitter"),
    "input": KnownFact(number_from(), "program", "input_units_per_s"),
    "per_node": KnownFact(whole_number(1), "cluster", "ranks_per_node"),
    "link": KnownFact(_rate_in(1e9), "cluster", "node_gbit_per_s"),
    "gpu_link": KnownFact(_rate_in(8e9), "cluster", "gpu_link_gb_per_s"),
    "transport": KnownFact(_choice(_TRANSPORTS), "cluster", "transport"),
    "alpha_us": KnownFact(number_from(), "cluster", "alpha_us"),
    "oversubscription": KnownFact(number_from(1), "cluster", "oversubscription"),
    "leaf_nodes": KnownFact(whole_number(1), "cluster", "nodes_per_leaf"),
}
"""Facts by key, which is also their option's name."""


def with_fact(setup: Setup, key: str, value: object) -> Setup:
    """Return a setup with a fact; the data axes of a mesh also state the exchange."""
    part, field = FACTS[key][1:]
    changes = {field: value}
    if isinstance(value, Layout) and (value.dp_shard, value.dp_replicate) != (1, 1):
        name = "all_reduce" if value.dp_shard == 1 else "shard_all"
        changes["exchange"] = Exchange(name)
    return replace(setup, **{part: replace(getattr(setup, part), **changes)})


def layout_notes(setup: Setup, sizes: Sequence[Size]) -> Iterable[str]:
    """Yield doubts about a layout, or raise ``UsageError`` if it does not fit."""
    program, mesh = setup.program, setup.program.mesh
    for size in sizes:
        program.layout(size.num_ranks)
        require_nodes(setup.cluster.ranks_per_node, size.num_ranks)
    cluster = setup.cluster
    if (cluster.oversubscription > 1) != (cluster.nodes_per_leaf > 0):
        raise UsageError("oversubscription and leaf_nodes need each other. Give both.")
    data, exchange = (mesh.dp_shard, mesh.dp_replicate), program.exchange
    is_sharded, is_local = mesh.dp_shard != 1, program.period > 1
    is_split, is_stated = program.model_ranks > 1, is_local or data != (1, 1)
    is_unfit = exchange is Exchange.PARAMETER_SERVER and (is_stated or is_split)
    is_unfit |= is_stated and is_sharded != (exchange.zero > 0)
    if is_unfit or (is_sharded and is_local):
        raise UsageError(
            "exchange must be all_reduce, with dp_shard shard_all or shard_gradients, "
            f"got {exchange} with mesh {mesh} and period {program.period:g}."
        )
    if is_split:
        keys = ["parameters", "blocks", "hidden", "sequence", "gpu_link"]
        keys += ["microbatches"] * (mesh.pp > 1)
        batch = min(size.batch or 0.0 for size in sizes)
        missing = [key for key in keys if fact_of(setup, key) is None]
        if missing := missing + ["batch"] * (not batch):
            raise UsageError(f"tp and pp need {', '.join(missing)}. Give all of them.")
        parts, stages = program.microbatches or 1, mesh.pp * program.chunks
        if parts > batch or stages > (program.num_blocks or 1):
            raise UsageError(
                f"microbatches must be at most the {batch:g} samples of a copy, and pp "
                f"* chunks the {program.num_blocks} blocks, got {parts} and {stages}."
            )
    g = min(setup.cluster.ranks_per_node, *(size.num_ranks for size in sizes))
    if g % mesh.tp:
        yield f"tp={mesh.tp} leaves nodes of {g}: every block waits for the network."
    if is_split or is_local or 1 not in data:
        yield (
            "Model parallelism, HSDP and local SGD go by volume: not validated here, "
            "and no interval holds the error of that."
        )


def require_nodes(ranks_per_node: int, num_ranks: int) -> None:
    """Raise ``UsageError`` if ranks do not fill their nodes."""
    g, n = ranks_per_node, num_ranks
    if n > g and n % g:
        raise UsageError(
            f"ranks must be a multiple of {g} a node, got {n}. Give {n // g * g}, or "
            "another number of ranks per node."
        )


def fact_of(setup: Setup, key: str) -> object:
    part, field = FACTS[key][1:]
    return getattr(getattr(setup, part), field)


def read_fact(key: str, text: str, where: str) -> object:
    try:
        return FACTS[key].read(text)
    except UsageError as error:
        raise UsageError(f"{where} {key} {error}") from None


def require_near(setup: Setup, batch: float, option: str) -> None:
    """Raise ``UsageError`` for a batch that is too far from the measured ones."""
    known = [p.size.batch for p in setup.points if p.size.batch is not None]
    if not known:
        raise UsageError(f"{option} needs today's batch of a rank. Give --batch.")
    least, most = min(known) / _FARTHEST_BATCH, max(known) * _FARTHEST_BATCH
    if not least <= batch <= most:
        raise UsageError(
            f"{option} must leave a rank {least:g} to {most:g} samples, 8 times around "
            f"the measured batch, got {batch:g}. Measure one nearer to it."
        )


def read_cluster_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts of a cluster file by key, and the text of its prices."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--cluster must be a file of TOML, got {error}.") from error
    prices: object = content.pop("cost", {})
    if not isinstance(prices, dict):
        raise UsageError(
            f"cost in {path} must be a table, got {prices!r}. Write [cost]"
        )
    keys = [key for key, fact in FACTS.items() if fact.part == "cluster"]
    require_known(content, keys, str(path))
    facts = {key: read_fact(key, str(v), f"{path}:") for key, v in content.items()}
    return facts, {k: str(v) for k, v in cast("dict[str, object]", prices).items()}


def require_known(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ``UsageError``, with the nearest known key, for the first unknown one."""
    for key in set(keys) - set(known):
        near = nearest(key, list(known), 0.5)
        cure = f"Did you mean {near}?" if near else f"Known: {', '.join(known)}."
        raise UsageError(f"{where}: unknown key {key!r}. {cure}")
