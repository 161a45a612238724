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
_LEAST_PART = 0.05
_LEAST_UNEVEN = 0.05
_LEAST_SAMPLES = 1000
_NOTHING = 0.01
_MANY_FAILED = 0.1
_BOUND = {
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
    """One conclusion: number, place, cause, remedy and a bound on the gain."""

    kind: str  # a field of ``ProfileShares``, or ``note``
    text: str
    ranks: tuple[int, ...] = ()  # places in ``ProfileReport.ranks``
    place: str = ""
    gain: float | None = None  # the job is at most so many times as fast


def find_headline(report: ProfileReport) -> str:
    """Return a sentence on the largest share."""
    name, shares = report.traits.name, report.shares._asdict()
    if not any(shares.values()):
        return f"{name} was not sampled."
    largest = max(shares, key=lambda kind: shares[kind])
    hosts = list(dict.fromkeys(rank.host for rank in report.ranks))
    unit = "GPU" if report.traits.has_gpus else "rank"
    where = f"{counted(len(hosts), 'node')} x {len(report.ranks) // len(hosts)} {unit}s"
    if len(report.ranks) % len(hosts) or len(hosts) == 1:
        where = f"{counted(len(report.ranks), unit)} on {counted(len(hosts), 'node')}"
    return f"{name} {_BOUND[largest]} in this configuration ({where})."


def find_advice(report: ProfileReport) -> tuple[Advice, ...]:
    """Return the conclusions, the largest gain first and notes last."""
    found = [rule(report) for rule in _RULES] if any(report.shares) else []
    advice = [each for each in found if each is not None]
    advice.sort(key=lambda each: -(each.gain or 0.0))
    notes = [rule(report) for rule in _NOTES]
    return (*advice, *(note for note in notes if note is not None))


def _gain(part: float) -> float:
    return 1.0 / max(0.01, 1.0 - part)


def _ended(text: str, gain: float) -> str:
    return f"{text} Gain: at most {gain:.2f}x."


def name_report(rank: RankReport) -> str:
    return f"worker {rank.worker}" if rank.rank is None else f"rank {rank.rank}"


def advise_late_rank(report: ProfileReport) -> Advice | None:
    """Name the rank that others wait for most, and its slowest line."""
    index = max(range(len(report.ranks)), key=lambda i: report.ranks[i].blame)
    rank, waiting = report.ranks[index], report.shares.waiting
    if waiting < _LEAST_WAITING or rank.blame < 0.5 * waiting:
        return _advise_late_ranks(report) if waiting >= _LEAST_WAITING else None
    found = max(report.lines, key=lambda line: _excess(line, index), default=None)
    where, place = "", ""
    remedy = f"Compare {rank.host} with the other nodes: ronde check."
    if found and _excess(found, index) > 0.01:
        own = found.own_shares()
        usual, place = own[index] - _excess(found, index), found.place
        where = f"; it alone spends {own[index]:.0%} of its time at {place}"
        remedy = "Divide this work among the ranks, or leave it out."
        if usual > 0.2 * own[index]:
            where = f", which spends {own[index] / usual - 1:.0%} more time at {place}"
            remedy = "Even out the ranks' work there. If it is even, compare "
            remedy += f"{rank.host} with the other nodes: ronde check."
    times = f"{rank.num_late} of {report.traits.num_rounds} {report.traits.rounds}"
    text = f"The ranks wait {waiting:.0%} of the time, mostly for {name_report(rank)} "
    text += f"({rank.host}; last in {times}){where}. {remedy}"
    gain = _gain(rank.blame)
    return Advice("waiting", _ended(text, gain), (index,), place, gain)


def _advise_late_ranks(report: ProfileReport) -> Advice:
    waiting, order = report.shares.waiting, range(len(report.ranks))
    last = sorted(order, key=lambda i: -report.ranks[i].blame)
    last = [index for index in last if report.ranks[index].blame > 0.1 * waiting]
    names = list_first([name_report(report.ranks[index]) for index in last], 4)
    which = f": {names}" if names else ""
    text = f"The ranks wait {waiting:.0%} of the time for each other, in turn{which}. "
    text += "Their work differs from step to step: give each step equal work, "
    text += "for example by batches of equal length."
    gain = _gain(waiting)
    return Advice("waiting", _ended(text, gain), tuple(last), "", gain)


def _excess(line: LineReport, index: int) -> float:
    """Return the time that a rank spends at a line beyond the median other rank."""
    own = line.own_shares()
    return own[index] - median([*own[:index], *own[index + 1 :]] or own)


def advise_input(report: ProfileReport) -> Advice | None:
    """Find slow input, and the loop that waits for it."""
    part, traits = report.shares.input, report.traits
    if part < _LEAST_PART:
        return None
    where = f" at {traits.input_place}" if traits.input_place else ""
    remedy = "Give its DataLoader more workers (num_workers), as many as there are "
    remedy += "free cores per rank; ronde top shows them."
    if traits.is_loading_itself:
        remedy = "Its DataLoader has no workers, so that the rank loads every batch "
        remedy += "itself. Set num_workers to the number of free cores per rank."
    text = f"{part:.0%} of the time goes to input{where}. {remedy}"
    gain = _gain(part)
    return Advice("input", _ended(text, gain), (), traits.input_place, gain)


def advise_communication(report: ProfileReport) -> Advice | None:
    """Find communication that no compute hides, and its line."""
    part, engine = report.shares.communication, report.traits.engine
    if part < _LEAST_PART:
        return None
    place, by = _place_of(report, "communication"), f" by {engine}" if engine else ""
    text = f"{part:.0%} of the time is communication{by} that no compute hides, most "
    text += f"of it at {place}. Communicate less often (a larger batch, or "
    text += "backward_passes_per_step), send less (compression), or compare engines "
    text += "and bucket sizes: ronde bench."
    gain = _gain(part)
    return Advice("communication", _ended(text, gain), (), place, gain)


def advise_checkpoint(report: ProfileReport) -> Advice | None:
    part = report.shares.checkpoint
    if part < _LEAST_PART / 2:
        return None
    place = _place_of(report, "checkpoint")
    text = f"{part:.0%} of the time goes to checkpoints and files, most of it at "
    text += f"{place}. Save less often, or copy the state and save it in a thread."
    gain = _gain(part)
    return Advice("checkpoint", _ended(text, gain), (), place, gain)


def advise_sync(report: ProfileReport) -> Advice | None:
    part = report.shares.sync
    if part < _LEAST_PART / 2:
        return None
    place = _place_of(report, "sync")
    text = f"For {part:.0%} of the time the program waits for its GPU, most of it at "
    text += f"{place}. Read values such as the loss every few steps only; a wait for "
    text += "compute that is needed anyhow stays."
    gain = _gain(part)
    return Advice("sync", _ended(text, gain), (), place, gain)


def advise_balance(report: ProfileReport) -> Advice | None:
    """Find the line whose time differs most between ranks, if none is late for it."""
    if len(report.ranks) < 2 or report.shares.waiting >= _LEAST_WAITING:
        return None
    spread = {
        line: max(line.own_shares()) - median(line.own_shares())
        for line in report.lines
    }
    found = max(spread, key=lambda line: spread[line], default=None)
    if found is None or spread[found] < _LEAST_UNEVEN:
        return None
    own = found.own_shares()
    index = own.index(max(own))
    text = f"{found.place} takes {own[index]:.0%} of the time of "
    text += f"{name_report(report.ranks[index])}, and {median(own):.0%} of the median "
    text += "rank's. Give the ranks equal work there."
    gain = _gain(spread[found])
    return Advice("compute", _ended(text, gain), (index,), found.place, gain)


def _place_of(report: ProfileReport, kind: str) -> str:
    parts = {line.place: getattr(line.shares, kind) for line in report.lines}
    return max(parts, key=lambda place: parts[place], default="an unknown line")


def note_nothing(report: ProfileReport) -> Advice | None:
    """Name the shares where nothing is left to gain."""
    names = [n for kind, n in _NAMES.items() if getattr(report.shares, kind) < _NOTHING]
    if not names or not any(report.shares):
        return None
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    return Advice("note", f"No time in {listed}. Nothing to gain there.")


def note_precision(report: ProfileReport) -> Advice | None:
    """Report how far a share may be off if there are few samples."""
    nums = [rank.num_samples for rank in report.ranks if rank.num_samples]
    if not nums or min(nums) >= _LEAST_SAMPLES:
        return None
    error = 1.0 / min(nums) ** 0.5
    text = f"Few samples: {fmean(nums):,.0f} per rank. A share of one rank may be off "
    return Advice("note", f"{text}by {error:.0%} of its time. Sample longer.")


def note_problems(report: ProfileReport) -> Advice | None:
    """Report ranks without samples, and failed readings."""
    missing = [name_report(rank) for rank in report.ranks if not rank.num_samples]
    reasons = dict.fromkeys(text for _, text in report.traits.problems)
    if missing:
        why = f" ({list_first([*reasons], 2, '; ')})" if reasons else ""
        text = f"Without samples: {list_first(missing)}{why}."
        return Advice("note", f"{text} The shares are of the other ranks.")
    if reasons or report.traits.failed > _MANY_FAILED:
        why = f": {list_first([*reasons], 2, '; ')}" if reasons else ""
        text = f"{report.traits.failed:.0%} of the readings failed{why}."
        return Advice("note", f"{text} The shares are of the others.")
    return None


def note_ddp(report: ProfileReport) -> Advice | None:
    if not report.traits.is_ddp_opaque:
        return None
    text = "DDP communicates inside backward(), in C++, where stacks do not show it: "
    text += "this communication, and waiting for late ranks in it, count as compute."
    return Advice("note", text)


def note_gpus(report: ProfileReport) -> Advice | None:
    if not report.traits.has_gpus:
        return None
    text = (
        "The stacks are of the Python thread. GPU work counts at the line that waits "
    )
    return Advice(
        "note", f"{text}for it; backward() runs in a thread that is not seen."
    )


_Rule = Callable[[ProfileReport], Advice | None]
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
    note_precision,
    note_problems,
    note_ddp,
    note_gpus,
)
