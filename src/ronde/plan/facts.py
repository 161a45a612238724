"""Facts of programs and clusters as text: options, cluster files and what-ifs."""

import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, cast

from ronde.arguments import one_of, whole_number
from ronde.errors import UsageError
from ronde.plan.setup import Cluster, Exchange, Overlap, Program, Setup
from ronde.units import parse_size_bytes

ALGORITHMS = (
    *("ring", "tree", "halving_doubling", "two_levels"),
    *("parameter_server", "in_network", "nccl"),
)
ITEMSIZES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_COMPRESSIONS = {
    "none": 1.0, "fp16": 0.5, "bf16": 0.5,
    "powersgd": 1 / 30,  # rank 4 on a large network, without the time of packing
}
_RATE = re.compile(r"(?:([1-9]\d{0,3})x)?(\d+(?:\.\d+)?)([GMT]bit/s|[GM]B/s)")
_GBIT = {"Mbit/s": 1e-3, "Gbit/s": 1.0, "Tbit/s": 1e3, "MB/s": 8e-3, "GB/s": 8.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def read_gbit_per_s(text: str) -> float:
    """Read ``400Gbit/s``, ``50GB/s``, or ``8x400Gbit/s`` for all of a node."""
    match = _RATE.fullmatch(text)
    rate = float(match[2]) * int(match[1] or 1) * _GBIT[match[3]] if match else 0.0
    if not 0 < rate < math.inf:
        raise UsageError(
            f"must be a rate above 0, got {text!r}. Write it as 400Gbit/s, 50GB/s or "
            "8x400Gbit/s."
        )
    return rate


def read_count(text: str) -> int:
    """Read a number of parameters or samples: ``7B``, ``350M`` or ``7e9``."""
    match = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([kmbt]?)", text.lower()
    )
    count = int(float(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    if not 0 < count < 10**18:
        raise UsageError(
            f"must be a number of parameters, got {text!r}. Write it as 7B, 350M or "
            "7e9."
        )
    return count


def number_from(least: float) -> Callable[[str], float]:
    """Return a reader of finite numbers of at least ``least``, or above 0."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= least and (least or value > 0):
            return value
        rule = f"of at least {least:g}" if least else "above 0"
        raise UsageError(f"must be a number {rule}, got {text!r}.")

    return read


def _choice(values: Mapping[str, Any]) -> Callable[[str], Any]:
    return lambda text: values[one_of(*values)(text)]


class Fact(NamedTuple):
    """A fact that an option, a file or a what-if may state."""

    read: Callable[[str], Any]
    of: type[Program] | type[Cluster]
    field: str
    measured: str = ""  # the field of the measured link that it scales


FACTS: Mapping[str, Fact] = {
    "parameters": Fact(read_count, Program, "num_parameters"),
    "dtype": Fact(_choice(ITEMSIZES), Program, "itemsize"),
    "overlap": Fact(_choice({str(o): o for o in Overlap}), Program, "overlap"),
    "exchange": Fact(_choice({str(e): e for e in Exchange}), Program, "exchange"),
    "algorithm": Fact(one_of(*ALGORITHMS), Program, "algorithm"),
    "compression": Fact(_choice(_COMPRESSIONS), Program, "compression"),
    "bucket": Fact(parse_size_bytes, Program, "bucket_cap_bytes"),
    "compute": Fact(number_from(0), Program, "compute_speed"),
    "jitter": Fact(number_from(0), Program, "jitter"),
    "per_node": Fact(whole_number(1), Cluster, "ranks_per_node"),
    "link": Fact(read_gbit_per_s, Cluster, "node_gbit_per_s", "between"),
    "gpu_link": Fact(
        lambda text: read_gbit_per_s(text) / 8, Cluster, "gpu_link_gb_per_s", "inside"
    ),
    "transport": Fact(one_of("tcp", "rdma"), Cluster, "transport"),
    "alpha_us": Fact(number_from(0), Cluster, "alpha_us", "between"),
    "oversubscription": Fact(number_from(1), Cluster, "oversubscription"),
    "leaf_nodes": Fact(whole_number(1), Cluster, "nodes_per_leaf"),
}
"""Facts by key, which is also their option's name."""
_IN_A_FILE = [key for key, fact in FACTS.items() if fact.of is Cluster]


def with_fact(setup: Setup, key: str, value: object) -> Setup:
    fact = FACTS[key]
    if fact.of is Program:
        return replace(setup, program=replace(setup.program, **{fact.field: value}))
    return replace(setup, cluster=replace(setup.cluster, **{fact.field: value}))


def fact_of(setup: Setup, key: str) -> Any:
    fact = FACTS[key]
    return getattr(setup.program if fact.of is Program else setup.cluster, fact.field)


def read_fact(key: str, text: str, where: str) -> Any:
    """Read a value; ``where`` begins the message if it is wrong."""
    try:
        return FACTS[key].read(text)
    except UsageError as error:
        raise UsageError(f"{where}{key} {error}") from None


def read_cluster_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts of a cluster file by key, and the text of its prices.

    Raises:
        UsageError: It is no TOML, or has an unknown key or a wrong value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--cluster must be a file of TOML: {error}.") from error
    prices = cast("object", content.pop("cost", {}))
    if not isinstance(prices, dict):
        raise UsageError(
            f"cost in {path} must be a table, got {prices!r}. Write [cost]"
        )
    facts: dict[str, Any] = {}
    for key, value in content.items():
        require_known(key, _IN_A_FILE, str(path))
        facts[key] = read_fact(key, str(value), f"{path}: ")
    return facts, {k: str(v) for k, v in cast("dict[str, object]", prices).items()}


def require_known(key: str, known: Collection[str], where: str) -> None:
    """Raise ``UsageError``, with the nearest known key, if a key is unknown."""
    if key not in known:
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        cure = f"Did you mean {near[0]}?" if near else "Correct it, or leave it out."
        raise UsageError(f"{where}: unknown key {key!r}. {cure}")
