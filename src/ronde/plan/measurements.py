"""Setups from records of ``ronde bench train`` and of ``ronde bench``.

Records are read by kind. Facts that older records do not have stay unknown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ronde.errors import UsageError
from ronde.parallel.buckets import BucketLimits
from ronde.plan import setup as given
from ronde.plan.facts import LEAST, MOST, fact_of
from ronde.plan.setup import Cluster, Point, Program, Setup, Size, speeds_by_size
from ronde.records import Record, read_records
from ronde.units import counted

_TRAINING, _COLLECTIVES = "bench_train", "bench"
_MOST_DIFFERENT = 0.1
_SENT = {"fp16": 2.0, "bf16": 2.0}  # bytes of an element
_SAME = ("model", "dtype", "batch_a_rank", "framework", "optimizer", "device")
_KEYS = ("parameters", "dtype", "overlap", "algorithm", "jitter")
_PARTS = ("hosts", "gradients", "buckets", "spread")


class Inputs(NamedTuple):
    """A setup, and the origins of its facts by their keys."""

    setup: Setup  # without points if no training was measured
    measured: Sequence[str] = ()
    stated: Sequence[str] = ()
    assumed: Sequence[str] = ()
    unknown: Sequence[str] = ()
    left_out: Sequence[str] = ()
    is_from_cpu: bool = False


def read_measured(
    paths: Sequence[Path], per_node: int | None, *, are_batches_mixed: bool = False
) -> Inputs:
    """Read records of one program on one cluster; refuse contradicting ones.

    Args:
        per_node: Ranks of a node, for records that do not have their hosts.
    """
    records = [(path, record) for path in paths for record in _read(path)]
    runs = [(path, r.values) for path, r in records if r.kind == _TRAINING]
    _refuse_mixture(runs, are_batches_mixed=are_batches_mixed)
    try:
        for path, values in runs:
            _require_figures(path, values)
        return _of_records(records, runs, per_node)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"a record must be complete, got a wrong value: {error!r}. Measure again."
        ) from error


def _of_records(
    records: Sequence[tuple[Path, Record]],
    runs: Sequence[tuple[Path, Mapping[str, Any]]],
    per_node: int | None,
) -> Inputs:
    links = dict(link for _, r in records for link in _links(r))
    cluster = Cluster(per_node or 1, **links)
    setup = Setup(Program(), cluster, ())
    known = [f"links {name} nodes" for name in links]
    left_out: list[str] = []
    if not links and len(runs) < len(records):
        left_out.append("the records of collectives: they have no fit of a link")
    if not runs:
        return Inputs(setup, known, left_out=left_out)
    last = max((values for _, values in runs), key=lambda values: values["num_ranks"])
    hosts = last.get("hosts") or [last["num_ranks"]]
    # A run on one node does not show how many ranks further nodes have.
    is_node_known = len(hosts) > 1 or (per_node or math.inf) < hosts[0]
    g = max(hosts) if is_node_known and "hosts" in last else per_node or hosts[0]
    points = unite(point for _, values in runs for point in _points(values, g))
    setup = Setup(_program(last, g), replace(cluster, ranks_per_node=g), points)
    parts = [part for part in _PARTS if last.get(part)]
    known += [key for key in _KEYS if fact_of(setup, key) not in (None, "")]
    known += ["phases", *parts, *["per_node"] * (is_node_known and "hosts" in parts)]
    if last.get("input") == "prepared":
        left_out.append("the input: batches were prepared, so it costs nothing")
    if len(parts) < len(_PARTS):
        left_out.append("parts of a record of an older ronde, or of other frameworks")
    is_from_cpu = last["device"] == "cpu"
    if is_from_cpu:
        left_out.append("GPUs: the record is from a CPU")
    return Inputs(setup, known, left_out=left_out, is_from_cpu=is_from_cpu)


def _read(path: Path) -> list[Record]:
    try:
        records = read_records(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"RECORD must be a file of records, got {error}.") from error
    known = [r for r in records if r.kind in (_TRAINING, _COLLECTIVES)]
    if not known:
        raise UsageError(
            f"{path} must have a record of kind {_TRAINING} or {_COLLECTIVES}, but has "
            "none. Type: ronde bench train --json FILE"
        )
    return known


def _refuse_mixture(
    runs: Sequence[tuple[Path, Mapping[str, Any]]], *, are_batches_mixed: bool
) -> None:
    for path, values in runs:
        if not values.get("is_in_step", True):
            raise UsageError(
                f"{path} has a training whose ranks' weights differ at the end. Its "
                "speed means nothing: measure again."
            )
    for key in _SAME:
        found = {str(values.get(key)): path for path, values in runs}
        if len(found) > 1 and not (are_batches_mixed and key == "batch_a_rank"):
            (a, in_a), (b, in_b), *_ = found.items()
            cure = " or ask --what-if batch=N" if key == "batch_a_rank" else ""
            raise UsageError(
                f"{key} must be the same in all records, got {a} in {in_a} and {b} in "
                f"{in_b}. Give records of one kind{cure}."
            )


def _require_figures(path: Path, values: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for a figure that predictions use and no run can have."""
    figures = [(key, values[key], 1.0) for key in ("num_ranks", "num_parameters")]
    figures += [("batch_a_rank", values["batch_a_rank"], LEAST)]
    figures += [("hosts", num, 1) for num in values.get("hosts") or ()]
    for name, variant in values["variants"].items():
        keys = {"step_ms", "units_per_s"} & variant.keys()
        figures += [(f"{name}.{key}", variant[key], LEAST) for key in keys]
        phases: dict[str, Any] = variant.get("phases_ms") or {}
        figures += [(f"{name}.phases_ms.{key}", ms, 0) for key, ms in phases.items()]
    for gradient in values.get("gradients") or ():
        figures += [("gradients", figure, 0) for figure in gradient]
    figures += [("spread", (values.get("spread") or {}).get("between_ranks") or 0, 0)]
    for name, value, least in figures:
        number = value if isinstance(value, int | float) else math.nan
        if isinstance(value, bool) or not least <= number <= MOST:
            raise UsageError(
                f"{name} in {path} must be a number from {least:g} to {MOST:g}, got "
                f"{value!r}. Measure again."
            )


def _program(values: Mapping[str, Any], ranks_per_node: int) -> Program:
    variants = values["variants"]
    whole, apart = variants.get("one_rank"), variants.get("no_communication")
    phases_s = {k: ms / 1e3 for k, ms in (whole or apart)["phases_ms"].items()}
    forward, backward, update = (phases_s[k] for k in ("forward", "backward", "update"))
    load = phases_s["input"] + phases_s["host_to_device"]
    host_share = None
    if whole and apart and ranks_per_node > 1:
        more = max(0.0, apart["step_ms"] / whole["step_ms"] - 1)
        host_share = more * 3 / math.log2(ranks_per_node)
    buckets: dict[str, Any] = values.get("buckets") or {}
    spread: dict[str, Any] = values.get("spread") or {}
    units = whole["units_per_s"] * whole["step_ms"] / 1e3 if whole else 0.0
    return Program(
        name=values["model"],
        unit=values["unit"],
        units_a_sample=round(units / values["batch_a_rank"]) or 1.0,
        num_parameters=values["num_parameters"],
        itemsize=_SENT.get(values.get("compression", "none"), 4.0),
        overlap=given.Overlap.BUCKET,
        algorithm=values.get("algorithm") or "",
        phases=given.PhaseTimes(forward, backward, update, load),
        gradients=tuple(
            given.ArrivingGradient(numel, itemsize, ready_ms / 1e3)
            for numel, itemsize, ready_ms in values.get("gradients") or ()
        ),
        bucket_cap_bytes=buckets.get("other_bytes") or BucketLimits().other_bytes,
        host_share=host_share,
        jitter=spread.get("between_ranks"),
    )


def _points(values: Mapping[str, Any], per_node: int) -> Iterable[Point]:
    n, batch = values["num_ranks"], values["batch_a_rank"]
    nodes = len(values.get("hosts") or ()) or math.ceil(n / per_node)
    sizes = {"one_rank": Size(1, 1, batch), "all_ranks": Size(n, nodes, batch)}
    for variant, size in sizes.items():
        if variant in values["variants"]:
            yield Point(size, values["variants"][variant]["units_per_s"])


def unite(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return one point for each size, in order.

    Raises:
        UsageError: Two speeds of one size differ by more than 10 %.
    """
    by_size = speeds_by_size(points)
    for size, speeds in by_size.items():
        if not 0 < max(speeds) <= (1 + _MOST_DIFFERENT) * min(speeds):
            raise UsageError(
                f"speeds of {counted(size.num_ranks, 'rank')} must be above 0 and "
                f"agree within {_MOST_DIFFERENT:.0%}, got {min(speeds):g} and "
                f"{max(speeds):g}. Leave one of them out."
            )
    return tuple(Point(size, median(speeds)) for size, speeds in by_size.items())


def _links(record: Record) -> Iterable[tuple[str, Any]]:
    """Yield the fit of a record of ``ronde bench``, if it is of one kind of link."""
    fit = record.values.get("facts", {}).get("fit")
    if fit and fit["level"] != "mixed":
        alpha_us, beta_ns = fit["alpha_us"], fit["beta_ns_per_byte"]
        spread = max(0.05, fit["largest_residual"])
        facts = given.LinkFacts(alpha_us * 1e-6, beta_ns * 1e-9, spread)
        yield fit["level"], facts
