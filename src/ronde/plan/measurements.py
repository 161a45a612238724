"""Setups from measured records: of ``ronde bench train`` and of ``ronde bench``.

Records are read by kind. Facts that older records do not have stay unknown.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ronde.errors import UsageError
from ronde.plan.setup import (
    ArrivingGradient,
    Cluster,
    Exchange,
    LinkFacts,
    Overlap,
    PhaseTimes,
    Point,
    Program,
    Setup,
    Size,
)
from ronde.records import Record, read_records

TRAINING, COLLECTIVES = "bench_train", "bench"
_MOST_DIFFERENT = 0.1
_WORST_FIT = 0.3
_LEAST_FITTED_BYTES = 4096
_ITEMSIZES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0}
_MEASURED_FACTS = ("parameters", "dtype", "overlap", "exchange", "algorithm", "jitter")
_SAME = ("model", "dtype", "batch_a_rank", "framework", "optimizer", "device")


@dataclass(frozen=True, slots=True)
class Measured:
    """Facts of records; notes are on what they leave out."""

    setup: Setup  # without points if no training was measured
    notes: tuple[str, ...] = ()
    known: tuple[str, ...] = ()  # keys of facts, and parts of a record
    device: str = ""


def read_measured(
    paths: Sequence[Path], per_node: int | None, *, are_batches_mixed: bool = False
) -> Measured:
    """Read records of one program on one cluster.

    Args:
        per_node: Ranks of a node, for records that do not have their hosts.
        are_batches_mixed: Records of several batches are allowed.

    Raises:
        UsageError: The records contradict each other, or show a broken training.
    """
    records = [(path, record) for path in paths for record in _read(path)]
    training = [(p, r) for p, r in records if r.kind == TRAINING]
    _refuse_mixture(training, ("batch_a_rank",) if are_batches_mixed else ())
    links = [link for _, r in records if r.kind == COLLECTIVES for link in _links(r)]
    cluster = Cluster(per_node or 1)
    for name, facts in links:
        cluster = replace(cluster, **{name: facts})
    known = tuple(f"links {name} nodes" for name, _ in links)
    if not training:
        return Measured(Setup(Program(), cluster, ()), known=known)
    return _of_training([r.values for _, r in training], cluster, per_node, known)


def _read(path: Path) -> list[Record]:
    try:
        records = read_records(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"RECORD must be a file of records: {error}.") from error
    known = [r for r in records if r.kind in (TRAINING, COLLECTIVES)]
    if not known:
        raise UsageError(
            f"{path} must have a record of kind {TRAINING} or {COLLECTIVES}, but has "
            "none. Type: ronde bench train --json FILE"
        )
    return known


def _refuse_mixture(
    training: Sequence[tuple[Path, Record]], allowed: Sequence[str]
) -> None:
    for path, record in training:
        if not record.values.get("is_in_step", True):
            raise UsageError(
                f"{path}: the ranks' weights differ in the record of "
                f"{record.created_at}. Its speed is of a broken training: measure again."
            )
    for key in _SAME:
        values = {str(record.values.get(key)): path for path, record in training}
        if len(values) > 1 and key not in allowed:
            (a, in_a), (b, in_b), *_ = values.items()
            cure = " or ask with --what-if batch=N" if key == "batch_a_rank" else ""
            raise UsageError(
                f"{key} must be the same in all records, got {a} in {in_a} and {b} in "
                f"{in_b}. Give records of one kind{cure}."
            )


def _of_training(
    runs: Sequence[Mapping[str, Any]],
    cluster: Cluster,
    per_node: int | None,
    known: tuple[str, ...],
) -> Measured:
    last = max(runs, key=lambda values: values["num_ranks"])
    points = unite(point for run in runs for point in _points(run, per_node))
    variants = last["variants"]
    alone = variants.get("one_rank") or variants["no_communication"]
    phases = {name: ms / 1e3 for name, ms in alone["phases_ms"].items()}
    program = Program(
        name=last["model"],
        unit=last["unit"],
        units_a_sample=_units_a_sample(last),
        num_parameters=last["num_parameters"],
        itemsize=_ITEMSIZES.get(last.get("compression", "none"), 4.0),
        num_tensors=len(last.get("gradients") or ()) or None,
        overlap=Overlap.BUCKET,
        exchange=Exchange.ALL_REDUCE,
        algorithm=last.get("algorithm") or "",
        phases=PhaseTimes(
            phases["forward"],
            phases["backward"],
            phases["update"],
            phases["input"] + phases["host_to_device"],
        ),
        gradients=tuple(
            ArrivingGradient(int(numel), int(itemsize), ms / 1e3)
            for numel, itemsize, ms in last.get("gradients") or ()
        ),
        bucket_bytes=tuple((last.get("buckets") or {}).get("num_bytes", ())),
        host_share=_host_share(variants, _ranks_per_node(last, per_node)),
        jitter=(last.get("spread") or {}).get("between_ranks"),
    )
    cluster = replace(cluster, ranks_per_node=_ranks_per_node(last, per_node))
    parts = [k for k in ("gradients", "buckets", "hosts", "spread") if last.get(k)]
    notes: list[str] = []
    if last.get("input") == "prepared":
        notes.append("the input: batches were prepared before, so it costs nothing")
    if len(parts) < 4:
        notes.append("an older ronde wrote the record: it lacks gradients or hosts")
    keys = (*_MEASURED_FACTS, *(["per_node"] if "hosts" in parts else []))
    known = (*keys, "phases", *parts, *known)
    setup = Setup(program, cluster, points)
    return Measured(setup, tuple(notes), known, last["device"])


def _units_a_sample(values: Mapping[str, Any]) -> float:
    step_s = values["variants"]["all_ranks"]["step_ms"] / 1e3
    units = values["variants"]["all_ranks"]["units_per_s"] * step_s
    return units / values["num_ranks"] / values["batch_a_rank"]


def _ranks_per_node(values: Mapping[str, Any], per_node: int | None) -> int:
    hosts = values.get("hosts")
    return max(hosts) if hosts else per_node or values["num_ranks"]


def _points(values: Mapping[str, Any], per_node: int | None) -> Iterable[Point]:
    n, batch = values["num_ranks"], values["batch_a_rank"]
    hosts = values.get("hosts")
    nodes = len(hosts) if hosts else math.ceil(n / (per_node or n))
    sizes = {"one_rank": Size(1, 1, batch), "all_ranks": Size(n, nodes, batch)}
    for variant, size in sizes.items():
        if variant in values["variants"]:
            yield Point(size, values["variants"][variant]["units_per_s"])


def unite(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return one point for each size, in order; refuse points that contradict.

    Raises:
        UsageError: Two speeds of one size differ by more than 10 %.
    """
    by_size: dict[tuple[int, float], list[Point]] = {}
    for point in points:
        key = point.size.num_ranks, point.size.batch or 0.0
        by_size.setdefault(key, []).append(point)
    united: list[Point] = []
    for (n, _), same in sorted(by_size.items()):
        speeds = [point.units_per_s for point in same]
        if max(speeds) > (1 + _MOST_DIFFERENT) * min(speeds):
            raise UsageError(
                f"speeds of {n} ranks must agree within {_MOST_DIFFERENT:.0%}, got "
                f"{min(speeds):g} and {max(speeds):g}. Leave one of them out."
            )
        united.append(same[0]._replace(units_per_s=float(np.median(speeds))))
    return tuple(united)


def _host_share(variants: Mapping[str, Any], ranks_per_node: int) -> float | None:
    """Return the cost of 8 busy ranks of a node to each other, as a share of a step."""
    if ranks_per_node == 1 or not {"one_rank", "no_communication"} <= variants.keys():
        return None
    ratio = variants["no_communication"]["step_ms"] / variants["one_rank"]["step_ms"]
    return max(0.0, ratio - 1) * 7 / (ranks_per_node - 1)


def _links(record: Record) -> Iterable[tuple[str, LinkFacts]]:
    return ()
