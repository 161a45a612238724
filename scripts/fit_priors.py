"""Fit the priors of ``ronde plan`` to published training speeds.

    python scripts/fit_priors.py points.csv tasks.csv --write --left-out predicted.csv

``points.csv`` has published speeds, with the columns that ``ronde plan points`` reads,
and a column ``source``; ``tasks.csv`` has the same series, each cut short once or more
under a name of its own, ``SERIES@TRACK``, with empty speeds where a prediction is
asked for. The base values are from physics and data sheets. Expectation maximization
moves them: each series gives the posterior mean and variance of each unknown, each
source counts as the square root of its number of series, and the base counts as much
as ``PSEUDO`` series.

``--left-out`` writes the predictions of each source by priors that were fitted without
it. Intervals are widened so that 80 % of the speeds lie inside, by the predictions of
the other sources (split conformal prediction, Vovk et al. 2005). ``--write`` writes
``src/ronde/plan/priors.json``.
"""

import argparse
import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ronde.plan
from ronde.plan.posterior import Posterior, infer
from ronde.plan.priors import QUANTILE_90, SITUATIONS, Prior, Priors
from ronde.plan.setup import Exchange, Setup
from ronde.plan.sheet import SheetRow, setup_of
from ronde.plan.step import Hypothesis

BASE = Priors(
    unknowns={
        # Rates: half of them within a factor of 1.3, as data sheets go.
        "rdma_share": Prior(0.6, 1.6),  # of a line; GPUs behind PCIe get less
        "tcp_gb_per_s": Prior(2.5, 1.6),  # one process; slower lines give 95 %
        "nvlink_share": Prior(0.7, 1.6),  # of NCCL's planning figure
        "pcie_gb_per_s": Prior(5.0, 1.6),  # generation 3, a ring through the host
        "alpha_rdma": Prior(3.0, 1.6),  # us a message
        "alpha_tcp": Prior(8.0, 1.6),
        "window": Prior(0.67, 1.4),  # of computing: backward's share
        "server": Prior(2.0, 1.4),  # passes over a node's line: one each way
        # Shares and times: orders of magnitude.
        "leak": Prior(0.3, 2.2),
        "leak_sharded": Prior(0.2, 2.5),
        "host": Prior(0.04, 2.5),  # 8 busy ranks of a node, relative to one
        "growth": Prior(0.01, 2.5),  # a doubling of the nodes
        "launch": Prior(0.02, 2.5),  # of computing, independent of the batch
        "update": Prior(0.01, 3.0),  # s, of 336 M parameters
        "missing_between": Prior(0.05, 8.0),  # one pass, relative to computing
        "missing_inside": Prior(0.02, 2.5),
        "interference": Prior(0.2, 2.0),
        "fit": Prior(1.0, 1.066),  # error of a fitted link of 5 % residual
    },
    flat=0.85,
    ring_latency=0.8,
    servers_on_all=0.9,
    error=0.004,
    walk=0.01,
    crossing=3.0,
    widening=dict.fromkeys(SITUATIONS, 1.0),
)
PSEUDO = 20.0
NUM_ROUNDS = 4
NUM_DRAWS = 300
_FIXED = ("fit", "interference")  # no published series shows them


class Moments(NamedTuple):
    """One series' posterior: of each unknown in its prior's deviations."""

    source: str
    setup: Setup
    means: np.ndarray
    squares: np.ndarray
    masses: Mapping[Hypothesis, float]


def read(path: str | Path) -> dict[tuple[str, str], list[SheetRow]]:
    """Return the rows of each series, without the doubtful and the model-parallel."""
    found: dict[tuple[str, str], list[SheetRow]] = defaultdict(list)
    with Path(path).open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["split"] != "suspect" and row["kind"] != "model_parallel":
                found[row["source"], row["series"]].append(SheetRow(row, 0))
    return found


def moments(source: str, setup: Setup, priors: Priors) -> Moments:
    posterior = infer(setup, priors, NUM_DRAWS)
    z = np.concatenate([branch.z for branch in posterior.branches])
    weights, masses, start = posterior.weights, {}, 0
    for branch in posterior.branches:
        stop = start + len(branch.z)
        masses[branch.model.hypothesis] = float(weights[start:stop].sum())
        start = stop
    return Moments(source, setup, weights @ z, weights @ z**2, masses)


def maximize(found: Sequence[Moments], priors: Priors) -> Priors:
    counts = Counter(each.source for each in found)
    weights = np.array([counts[each.source] ** -0.5 for each in found])
    means = np.array([each.means for each in found])
    squares = np.array([each.squares for each in found])
    total, unknowns = weights.sum() + PSEUDO, dict[str, Prior]()
    for index, (name, prior) in enumerate(priors.unknowns.items()):
        base, center = BASE.unknowns[name], math.log(prior.middle)
        if name in _FIXED:
            unknowns[name] = base
            continue
        moved = center + prior.deviation * means[:, index]
        mean = (weights @ moved + PSEUDO * math.log(base.middle)) / total
        spread = prior.deviation**2 * (squares[:, index] - means[:, index] ** 2)
        of_base = base.deviation**2 + (math.log(base.middle) - mean) ** 2
        variance = (weights @ (spread + (moved - mean) ** 2) + PSEUDO * of_base) / total
        ratio = math.exp(QUANTILE_90 * math.sqrt(variance))
        unknowns[name] = Prior(math.exp(mean), ratio)
    return replace(priors, unknowns=unknowns, **_probabilities(found, weights))


def _probabilities(found: Sequence[Moments], weights: np.ndarray) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, is_servers, is_true in (
        ("flat", False, lambda h: h.algorithm == "ring"),
        ("ring_latency", False, lambda h: h.is_ring_latency),
        ("servers_on_all", True, lambda h: h.are_servers_on_all),
    ):
        mass, count = PSEUDO * getattr(BASE, name), PSEUDO
        for each, weight in zip(found, weights, strict=True):
            is_server = each.setup.program.exchange is Exchange.PARAMETER_SERVER
            if is_server == is_servers:
                count += weight
                mass += weight * sum(m for h, m in each.masses.items() if is_true(h))
        result[name] = float(mass / count)
    return result


def fit(series: Mapping[tuple[str, str], list[SheetRow]], left_out: str) -> Priors:
    setups = [
        (key[0], setup_of(rows)) for key, rows in series.items() if key[0] != left_out
    ]
    setups = [each for each in setups if len(each[1].points) > 1]
    priors = BASE
    for _ in range(NUM_ROUNDS):
        priors = maximize([moments(*each, priors) for each in setups], priors)
    return priors


class Case(NamedTuple):
    """A prediction beside the published speed, with the interval before widening."""

    source: str
    row: SheetRow
    situation: str
    middle: float
    low: float
    high: float
    measured: float

    @property
    def score(self) -> float:
        """The widening with which the interval just reaches the published speed."""
        bound = self.high if self.measured > self.middle else self.low
        return abs(
            math.log(self.measured / self.middle) / math.log(bound / self.middle)
        )


def predict(
    tasks: Mapping[tuple[str, str], list[SheetRow]],
    truth: Mapping[str, float],
    source: str,
    priors: Priors,
) -> list[Case]:
    cases: list[Case] = []
    for (of, _), rows in tasks.items():
        if of != source:
            continue
        posterior: Posterior = infer(setup_of(rows), priors)
        for row in (row for row in rows if not row.text("throughput")):
            found = posterior.predict(row.size)
            situation = posterior.situation(found.size)
            cases.append(
                Case(
                    source,
                    row,
                    situation,
                    found.middle,
                    found.low,
                    found.high,
                    truth[row.text("id")],
                )
            )
    return cases


def widening(cases: Iterable[Case]) -> dict[str, float]:
    scores: dict[str, list[float]] = {name: [] for name in SITUATIONS}
    for case in cases:
        scores[case.situation].append(case.score)
    return {
        name: round(float(np.quantile(each, 0.8)), 3) if each else 1.0
        for name, each in scores.items()
    }


def leave_out(
    series: Mapping, tasks: Mapping, truth: Mapping[str, float], source: str
) -> list[Case]:
    return predict(tasks, truth, source, fit(series, source))


def write_left_out(path: str | Path, cases: Sequence[Case]) -> None:
    with Path(path).open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("series", "id", "predicted", "low", "high"))
        for source in sorted({case.source for case in cases}):
            factors = widening(case for case in cases if case.source != source)
            for case in (case for case in cases if case.source == source):
                by = factors[case.situation]
                low, high = (
                    case.middle * (b / case.middle) ** by for b in (case.low, case.high)
                )
                figures = (f"{value:.6g}" for value in (case.middle, low, high))
                writer.writerow(
                    (case.row.text("series"), case.row.text("id"), *figures)
                )


def write_priors(priors: Priors, sources: Sequence[str], num_speeds: int) -> None:
    unknowns = [
        f'  "{name}": [{prior.middle:.4g}, {prior.ratio:.4g}]'
        for name, prior in priors.unknowns.items()
    ]
    others = {
        name: value if isinstance(value, dict) else float(f"{value:.4g}")
        for name, value in vars(priors).items()
        if name != "unknowns"
    }
    origin = {"script": "scripts/fit_priors.py", "speeds": num_speeds}
    lines = ",\n".join(unknowns)
    parts = (
        f' "fitted": {json.dumps(origin | {"sources": sources})}',
        f' "unknowns": {{\n{lines}\n }}',
        f' "others": {json.dumps(others)}',
    )
    path = Path(ronde.plan.__file__).with_name("priors.json")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("points")
    parser.add_argument("tasks")
    parser.add_argument("--left-out", metavar="FILE")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    series, tasks = read(options.points), read(options.tasks)
    truth = {
        r.text("id"): float(r.text("throughput"))
        for rows in series.values()
        for r in rows
    }
    sources = sorted({source for source, _ in series})
    with ProcessPoolExecutor(2) as pool:
        whole = pool.submit(fit, series, "")
        found = pool.map(partial(leave_out, series, tasks, truth), sources)
        cases = [case for each in found for case in each]
    if options.left_out:
        write_left_out(options.left_out, cases)
    priors = replace(whole.result(), widening=widening(cases))
    if options.write:
        write_priors(priors, sources, len(truth))
    for name, prior in priors.unknowns.items():
        base = BASE.unknowns[name]
        old, new = (f"{p.middle:9.4g} x{p.ratio:5.2f}" for p in (base, prior))
        print(f"{name:16s}{old} -> {new}")
    print({n: v for n, v in vars(priors).items() if n != "unknowns"})


if __name__ == "__main__":
    main()
