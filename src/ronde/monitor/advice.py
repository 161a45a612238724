"""Conclusions from the report on a profile: a headline, and advice with its gain.

Each rule is a function of the report. The bound on a gain is Amdahl's: a part of the
time becomes that of the median rank, or zero, and the rest stays as it is.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from ronde.monitor.profiling import LineReport, ProfileReport, RankReport
from ronde.units import counted, list_first

_LEAST_WAITING = 0.02
_LEAST_PART, _LEAST_STOP = 0.05, 0.025
_LEAST_SAMPLES = 1000
_NOTHING = 0.01
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


class Advice(NamedTuple):
    """One conclusion: number, location, cause, remedy and a bound on the gain."""

    kind: str  # a field of ``ProfileShares``, or ``note``
    text: str
    ranks: tuple[int, ...] = ()  # indices of ``ProfileReport.ranks``
    location: str = ""
    gain: float = 1.0  # the job is at most so many times as fast


_Rule = Callable[[ProfileReport], Advice | None]


def find_headline(report: ProfileReport) -> str:
    """Return a sentence on the largest share."""
    name, shares = report.traits.name, report.shares._asdict()
    if not any(shares.values()):
        return f"{name} was not sampled."
    state = _STATES[max(shares, key=lambda kind: shares[kind])]
    num, num_hosts = len(report.ranks), len({rank.host for rank in report.ranks})
    unit, nodes = "GPU" * report.traits.has_gpus or "rank", counted(num_hosts, "node")
    where = f"{nodes} x {counted(num // num_hosts, unit)}"
    if num % num_hosts or num_hosts == 1:
        where = f"{counted(num, unit)} on {nodes}"
    return f"{name} {state} in this configuration ({where})."


def find_advice(report: ProfileReport) -> tuple[Advice, ...]:
    """Return the conclusions, the largest gain first and notes last."""
    rules = _RULES if any(report.shares) else ()
    advice = [found for rule in rules if (found := rule(report))]
    advice.sort(key=lambda each: -each.gain)
    return (*advice, *(note for rule in _NOTES if (note := rule(report))))


def name_report(rank: RankReport) -> str:
    return f"worker {rank.worker}" if rank.rank is None else f"rank {rank.rank}"


def _advise(
    kind: str, text: str, part: float, location: str = "", ranks: Sequence[int] = ()
) -> Advice:
    gain = 1.0 / max(0.01, 1.0 - part)
    text = f"{text} Gain: at most {gain:.2f}x."
    return Advice(kind, text, tuple(ranks), location, gain)


def _excess(line: LineReport, index: int) -> float:
    """Return the time that a rank spends at a line beyond the median other rank."""
    own = line.own_shares()
    return own[index] - median([*own[:index], *own[index + 1 :]] or own)


def _location(report: ProfileReport, kind: str) -> str:
    parts = {line.location: getattr(line.shares, kind) for line in report.lines}
    return max(parts, key=lambda each: parts[each], default="an unknown line")


def advise_late_rank(report: ProfileReport) -> Advice | None:
    """Name the rank that others wait for most, and its slowest line."""
    waiting, blames = report.shares.waiting, [rank.blame for rank in report.ranks]
    if waiting < _LEAST_WAITING:
        return None
    index = blames.index(max(blames))
    if blames[index] < 0.5 * waiting:
        return _advise_late_ranks(report, waiting)
    rank = report.ranks[index]
    times = f"{rank.num_late} of {report.traits.num_rounds} {report.traits.rounds}"
    text = f"The ranks wait {waiting:.0%} of the time, mostly for {name_report(rank)} "
    text += f"({rank.host}; last in {times})"
    check = f"ompare {rank.host} with the other nodes: ronde check."
    line = max(report.lines, key=lambda line: _excess(line, index), default=None)
    excess = _excess(line, index) if line else 0.0
    if line is None or excess < 0.01:
        return _advise("waiting", f"{text}. C{check}", rank.blame, ranks=(index,))
    own = line.own_shares()[index]
    if excess < 0.8 * own:
        slower = excess / (own - excess)
        text += f", which spends {slower:.0%} more time at {line.location}. Even out "
        text += f"the ranks' work there. If it is even, c{check}"
    else:
        text += f"; it alone spends {own:.0%} of its time at {line.location}. "
        text += "Divide this work among the ranks, or leave it out."
    return _advise("waiting", text, rank.blame, line.location, (index,))


def _advise_late_ranks(report: ProfileReport, waiting: float) -> Advice:
    blames = {index: rank.blame for index, rank in enumerate(report.ranks)}
    late = [each for each in blames if blames[each] > 0.1 * waiting]
    late.sort(key=lambda each: -blames[each])
    names = list_first([name_report(report.ranks[each]) for each in late], 4)
    text = f"The ranks wait {waiting:.0%} of the time for each other, in turn"
    text += f"{': ' * bool(late)}{names}. Their work differs from step to step: give "
    text += "each step equal work, for example by batches of equal length."
    return _advise("waiting", text, waiting, ranks=late)


def advise_input(report: ProfileReport) -> Advice | None:
    """Find slow input, and the loop that waits for it."""
    part, location = report.shares.input, report.traits.input_location
    if part < _LEAST_PART:
        return None
    text = f"{part:.0%} of the time goes to input{f' at {location}' * bool(location)}. "
    if report.traits.is_loading_itself:
        text += "Its DataLoader has no workers: the rank loads every batch itself. "
        text += "Set num_workers to the number of free cores per rank."
    else:
        text += "Give its DataLoader more workers (num_workers), as many as there are "
        text += "free cores per rank; ronde top shows them."
    return _advise("input", text, part, location)


def advise_communication(report: ProfileReport) -> Advice | None:
    """Find communication that no compute hides, and its line."""
    part, engine = report.shares.communication, report.traits.engine
    if part < _LEAST_PART:
        return None
    location = _location(report, "communication")
    text = f"{part:.0%} of the time is communication{f' by {engine}' * bool(engine)} "
    text += f"that no compute hides, most of it at {location}. Communicate less often "
    text += "(a larger batch, or backward_passes_per_step), send less (compression), "
    text += "or compare engines and bucket sizes: ronde bench."
    return _advise("communication", text, part, location)


def advise_checkpoint(report: ProfileReport) -> Advice | None:
    part, location = report.shares.checkpoint, _location(report, "checkpoint")
    text = f"{part:.0%} of the time goes to checkpoints and files, most of it at "
    text += f"{location}. Save less often, or copy the state and save it in a thread."
    advice = _advise("checkpoint", text, part, location)
    return advice if part >= _LEAST_STOP else None


def advise_sync(report: ProfileReport) -> Advice | None:
    part, location = report.shares.sync, _location(report, "sync")
    text = f"For {part:.0%} of the time the program waits for its GPU, most of it at "
    text += f"{location}. Read values such as the loss less often. Compute that the "
    text += "program needs anyhow is part of this wait."
    advice = _advise("sync", text, part, location)
    return advice if part >= _LEAST_STOP else None


def advise_balance(report: ProfileReport) -> Advice | None:
    """Find the line that differs most between ranks, if no rank is late for it."""
    if len(report.ranks) < 2 or report.shares.waiting >= _LEAST_WAITING:
        return None
    excess, index, line = max(
        (
            (_excess(line, index), index, line)
            for line in report.lines
            for index in [line.own_shares().index(max(line.own_shares()))]
        ),
        key=lambda found: found[0],
        default=(0.0, 0, None),
    )
    nums = [rank.num_samples for rank in report.ranks if rank.num_samples]
    if line is None or excess < max(_LEAST_PART, 2.0 * min(nums) ** -0.5):
        return None
    own = line.own_shares()[index]
    text = f"{line.location} takes {own:.0%} of the time of "
    text += f"{name_report(report.ranks[index])}, and {own - excess:.0%} of the median "
    text += "other rank's. Give the ranks equal work there."
    return _advise("compute", text, excess, line.location, (index,))


def note_nothing(report: ProfileReport) -> Advice | None:
    """Name the shares that leave nothing to gain."""
    names = [n for kind, n in _NAMES.items() if getattr(report.shares, kind) < _NOTHING]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    note = Advice("note", f"No time in {listed}. Nothing to gain there.")
    return note if names and any(report.shares) else None


def note_start(report: ProfileReport) -> Advice | None:
    part, location = report.shares.other, _location(report, "other")
    text = (
        f"{part:.0%} of the time is imports, garbage collection or not in your code, "
    )
    text += f"most of it at {location}. To leave a start out: ronde profile --attach."
    return Advice("note", text) if part >= _LEAST_PART else None


def note_precision(report: ProfileReport) -> Advice | None:
    """Report the error of shares of few samples: two standard deviations at most."""
    nums = [rank.num_samples for rank in report.ranks if rank.num_samples]
    if not nums or min(nums) >= _LEAST_SAMPLES:
        return None
    text = f"Few samples: {fmean(nums):,.0f} per rank. A share of one rank may be off "
    return Advice("note", f"{text}by {min(nums) ** -0.5:.0%} of its time.")


def note_problems(report: ProfileReport) -> Advice | None:
    """Report ranks without samples, and missing samples."""
    missing = [name_report(rank) for rank in report.ranks if not rank.num_samples]
    reasons = dict.fromkeys(text for _, text in report.traits.problems)
    if not (missing or reasons or report.traits.missing > _MANY_MISSING):
        return None
    missed = f"{report.traits.missing:.0%} of the expected samples are missing"
    text = f"Without samples: {list_first(missing)}" if missing else missed
    text += f" ({list_first([*reasons], 2, '; ')})" * bool(reasons)
    return Advice("note", f"{text}. The shares are of the others.")


def note_ddp(report: ProfileReport) -> Advice | None:
    text = "DDP communicates inside backward(), in C++, where stacks do not show it: "
    text += "this communication, and waiting for late ranks in it, count as compute."
    return Advice("note", text) if report.traits.is_ddp_opaque else None


def note_gpus(report: ProfileReport) -> Advice | None:
    text = (
        "The stacks are of the Python thread. GPU work counts at the line that waits "
    )
    text += "for it; backward() runs in a thread that is not seen."
    return Advice("note", text) if report.traits.has_gpus else None


_RULES: Sequence[_Rule] = (
    advise_late_rank,
    advise_input,
    advise_communication,
    advise_checkpoint,
    advise_sync,
    advise_balance,
)
_NOTES: Sequence[_Rule] = (
    note_nothing,
    note_start,
    note_precision,
    note_problems,
    note_ddp,
    note_gpus,
)
