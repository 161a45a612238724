"""Conclusions from the report on a profile: a headline, and advice with its gain.

Each rule is a function of the report. The bound on a gain is Amdahl's: a part of the
time becomes that of the median rank, or zero, and the rest stays as it is.
"""

from collections.abc import Iterator
from statistics import fmean, median
from typing import NamedTuple

from ronde.monitor.profiling import LineReport, ProfileReport, RankReport
from ronde.units import counted, list_first

_LEAST_WAITING, _LEAST_OTHER = 0.02, 0.05
_LEAST_SAMPLES = 1000
_MANY_MISSING = 0.1
_STATES = {
    "compute": "spends its time computing",
    "communication": "is communication-bound",
    "waiting": "is held up by late ranks",
    "input": "is input-bound",
    "checkpoint": "is bound by checkpoints and files",
    "sync": "waits for its GPUs",
    "other": "spends its time outside of training",
}
_NAMES = {
    "communication": "communication",
    "waiting": "waiting for late ranks",
    "input": "input",
    "checkpoint": "checkpointing",
}
_LOADS_ITSELF = (
    "Its DataLoader has no workers: the rank loads every batch itself. Set num_workers "
    "to the number of free cores per rank."
)
_LOADS_IN_WORKERS = (
    "Give its DataLoader more workers (num_workers), as many as there are free cores "
    "per rank; ronde top shows them."
)
_TEXTS = {
    "input": "{part:.0%} of the time goes to input at {location}. {cure}",
    "communication": (
        "{part:.0%} of the time is communication{engine} that no compute hides, most "
        "of it at {location}. Communicate less often (a larger batch, or "
        "backward_passes_per_step), send less (compression), or compare engines and "
        "bucket sizes: ronde bench."
    ),
    "checkpoint": (
        "{part:.0%} of the time goes to checkpoints and files, most of it at "
        "{location}. Save less often, or copy the state and save it in a thread."
    ),
    "sync": (
        "For {part:.0%} of the time the program waits for its GPU, most of it at "
        "{location}. Read values such as the loss less often. Compute that the program "
        "needs anyhow is part of this wait."
    ),
}
_LEAST = {"input": 0.05, "communication": 0.05, "checkpoint": 0.025, "sync": 0.025}
_DDP = (
    "DDP communicates inside backward(), in C++, where stacks do not show it: this "
    "communication, and waiting for late ranks in it, count as compute."
)
_GPUS = (
    "The stacks are of the Python thread. GPU work counts at the line that waits for "
    "it; backward() runs in a thread that is not seen."
)


class Advice(NamedTuple):
    """One conclusion: number, location, cause, remedy and a bound on the gain."""

    kind: str  # a field of ``ProfileShares``, or ``note``
    text: str
    gain: float = 1.0  # the job is at most so many times as fast


def find_headline(report: ProfileReport) -> str:
    """Return a sentence on the largest share."""
    name, shares = report.name, report.shares._asdict()
    if not any(shares.values()):
        return f"{name} was not sampled."
    state = _STATES[max(shares, key=lambda kind: shares[kind])]
    num, num_hosts = len(report.ranks), len({rank.host for rank in report.ranks})
    unit, nodes = "GPU" * report.has_gpus or "rank", counted(num_hosts, "node")
    where = f"{nodes} x {counted(num // num_hosts, unit)}"
    if num % num_hosts or num_hosts == 1:
        where = f"{counted(num, unit)} on {nodes}"
    return f"{name} {state} in this configuration ({where})."


def find_advice(report: ProfileReport) -> tuple[Advice, ...]:
    """Return the conclusions, the largest gain first and notes last."""
    advice = [_advise_late_rank(report), *(_advise_part(report, k) for k in _TEXTS)]
    found = sorted(filter(None, advice), key=lambda each: -each.gain)
    return (*found, *(Advice("note", text) for text in _notes(report) if text))


def name_report(rank: RankReport) -> str:
    return f"worker {rank.worker}" if rank.rank is None else f"rank {rank.rank}"


def _advise(kind: str, text: str, part: float) -> Advice:
    gain = 1.0 / max(0.01, 1.0 - part)
    return Advice(kind, f"{text} Gain: at most {gain:.2f}x.", gain)


def _excess(line: LineReport, index: int) -> float:
    """Return the time that a rank spends at a line beyond the median other rank."""
    own = line.own_shares()
    return own[index] - median([*own[:index], *own[index + 1 :]] or own)


def _advise_late_rank(report: ProfileReport) -> Advice | None:
    """Name the rank that others wait for most, and its slowest line."""
    waiting, blames = report.shares.waiting, [rank.blame for rank in report.ranks]
    if waiting < _LEAST_WAITING:
        return None
    index = blames.index(max(blames))
    if blames[index] < 0.5 * waiting:
        return _advise_late_ranks(report, waiting)
    rank = report.ranks[index]
    times = f"{rank.num_late} of {report.num_rounds} {report.rounds}"
    text = f"The ranks wait {waiting:.0%} of the time, mostly for {name_report(rank)} "
    text += f"({rank.host}; last in {times})"
    check = f"ompare {rank.host} with the other nodes: ronde check."
    line = max(report.lines, key=lambda line: _excess(line, index), default=None)
    excess = _excess(line, index) if line else 0.0
    if line is None or excess < 0.01:
        return _advise("waiting", f"{text}. C{check}", rank.blame)
    own = line.own_shares()[index]
    if excess < 0.8 * own:
        slower = excess / (own - excess)
        text += f", which spends {slower:.0%} more time at {line.location}. Even out "
        text += f"the ranks' work there. If it is even, c{check}"
    else:
        text += f"; it alone spends {own:.0%} of its time at {line.location}. "
        text += "Divide this work among the ranks, or leave it out."
    return _advise("waiting", text, rank.blame)


def _advise_late_ranks(report: ProfileReport, waiting: float) -> Advice:
    blames = {index: rank.blame for index, rank in enumerate(report.ranks)}
    late = [each for each in blames if blames[each] > 0.1 * waiting]
    late.sort(key=lambda each: -blames[each])
    names = list_first([name_report(report.ranks[each]) for each in late], 4)
    text = f"The ranks wait {waiting:.0%} of the time for each other, in turn"
    text += f"{': ' * bool(late)}{names}. Their work differs from step to step: give "
    text += "each step equal work, for example by batches of equal length."
    return _advise("waiting", text, waiting)


def _advise_part(report: ProfileReport, kind: str) -> Advice | None:
    """Return the advice on a kind of time, with the line that has most of it."""
    part = getattr(report.shares, kind)
    if part < _LEAST[kind]:
        return None
    location = report.input_location if kind == "input" else ""
    text = _TEXTS[kind].format(
        part=part,
        location=location or _location(report, kind),
        engine=f" by {report.engine}" if report.engine else "",
        cure=_LOADS_ITSELF if report.is_loading_itself else _LOADS_IN_WORKERS,
    )
    return _advise(kind, text, part)


def _location(report: ProfileReport, kind: str) -> str:
    parts = {line.location: getattr(line.shares, kind) for line in report.lines}
    location = max(parts, key=lambda each: parts[each], default="")
    return location if parts.get(location) else "an unknown line"


def _notes(report: ProfileReport) -> Iterator[str]:
    shares, nums = report.shares, [rank.num_samples for rank in report.ranks]
    names = [n for kind, n in _NAMES.items() if getattr(shares, kind) < 0.01]
    if names and any(shares):
        listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        yield f"Under 1% of the time is {listed}: nothing to gain there."
    if shares.other >= _LEAST_OTHER:
        yield (
            f"{shares.other:.0%} of the time is imports, garbage collection or not in "
            f"your code, most of it at {_location(report, 'other')}. To leave the "
            "start out: ronde profile --attach."
        )
    least = min(filter(None, nums), default=_LEAST_SAMPLES)
    if least < _LEAST_SAMPLES:  # two standard deviations, at most
        yield (
            f"Few samples: {fmean(filter(None, nums)):,.0f} per rank. A share of one "
            f"rank may be off by {least**-0.5:.0%} of its time."
        )
    missing = [name_report(rank) for rank in report.ranks if not rank.num_samples]
    if missing or report.problems or report.missing > _MANY_MISSING:
        text = f"{report.missing:.0%} of the expected samples are missing"
        text = f"Without samples: {list_first(missing)}" if missing else text
        reasons = list_first(report.problems, 2, "; ")
        yield f"{text}{f' ({reasons})' * bool(reasons)}. The shares are of the others."
    if report.is_ddp_opaque:
        yield _DDP
    if report.has_gpus:
        yield _GPUS
