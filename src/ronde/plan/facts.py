"""Facts of programs and clusters as text, from options, files and changes."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ronde.arguments import nearest, one_of, whole_number
from ronde.collectives.pricing import ALL_REDUCES
from ronde.errors import UsageError
from ronde.plan.setup import Exchange, Overlap, Setup
from ronde.units import parse_bit_per_s, parse_count, parse_size_bytes

_ITEMSIZES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
# PowerSGD of rank 4 on a large network, without the time of packing.
_COMPRESSIONS = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "powersgd": 1 / 30}
_FARTHEST_BATCH = 8
_LEAST, _MOST = 1e-9, 1e15  # beyond them predictions would overflow


def read_pairs(text: str) -> dict[str, str]:
    parts = (pair.partition("=") for pair in text.split(","))
    return {key: value for key, _, value in parts}


def number_from(least: float = _LEAST) -> Callable[[str], float]:
    """Return a reader of numbers of at least ``least``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if least <= value <= _MOST:
            return value
        rule = "above 0" if least == _LEAST else f"of at least {least:g}"
        raise UsageError(f"must be a number {rule} and at most 1e15, got {text!r}.")

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
    "overlap": KnownFact(_choice({str(o): o for o in Overlap}), "program", "overlap"),
    "exchange": KnownFact(
        _choice({str(e): e for e in Exchange}), "program", "exchange"
    ),
    "algorithm": KnownFact(one_of(*ALL_REDUCES), "program", "algorithm"),
    "compression": KnownFact(_choice(_COMPRESSIONS), "program", "compression"),
    "bucket": KnownFact(parse_size_bytes, "program", "bucket_cap_bytes"),
    "compute": KnownFact(number_from(), "program", "compute_speed"),
    "jitter": KnownFact(number_from(0), "program", "jitter"),
    "input": KnownFact(number_from(), "program", "input_units_per_s"),
    "per_node": KnownFact(whole_number(1), "cluster", "ranks_per_node"),
    "link": KnownFact(_rate_in(1e9), "cluster", "node_gbit_per_s"),
    "gpu_link": KnownFact(_rate_in(8e9), "cluster", "gpu_link_gb_per_s"),
    "transport": KnownFact(one_of("tcp", "rdma"), "cluster", "transport"),
    "alpha_us": KnownFact(number_from(), "cluster", "alpha_us"),
    "oversubscription": KnownFact(number_from(1), "cluster", "oversubscription"),
    "leaf_nodes": KnownFact(whole_number(1), "cluster", "nodes_per_leaf"),
}
"""Facts by key, which is also their option's name."""


def with_fact(setup: Setup, key: str, value: object) -> Setup:
    part, field = FACTS[key][1:]
    changed = replace(getattr(setup, part), **{field: value})
    return replace(setup, **{part: changed})


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
