"""What to say of operations that some ranks wait for and others never asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ronde.coordination.messages import Pending
from ronde.coordination.ranges import format_ranks

_NAMES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is missing where.

    Attributes:
        text: The warning; empty where nobody waits for somebody else for long.
        is_fatal: Whether something has waited for longer than is allowed.
    """

    text: str
    is_fatal: bool


def judge_stall(
    answers: Mapping[int, Pending],
    size: int,
    *,
    warning_s: float,
    shutdown_s: float,
) -> Verdict:
    """Find what has waited for too long, and for whom.

    Args:
        answers: What each rank waits for; a rank that did not answer is not there.
        size: Number of ranks.
        warning_s: From here on it is too long.
        shutdown_s: From here on the job is to end; 0 for never.
    """
    late = _late_names(answers, warning_s)
    missing: dict[int, list[str]] = {}
    fatal: set[int] = set()
    for name, age_s in late.items():
        for rank in range(size):
            answer = answers.get(rank)
            if answer is not None and (name in answer.names or answer.has_joined):
                continue
            missing.setdefault(rank, []).append(name)
            if shutdown_s and age_s >= shutdown_s:
                fatal.add(rank)
    if not missing:
        return Verdict("", is_fatal=False)
    opening = (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by "
        "subset of ranks and are waiting for remainder of ranks for more than "
        f"{warning_s:g} seconds. This may indicate that different ranks are trying to "
        "submit different tensors or that only subset of ranks is submitting tensors, "
        "which will cause deadlock. "
    )
    lines = [
        opening,
        "Missing ranks:",
        *(
            f"{rank}{'!' if rank in fatal else ''}: [{_show(names)}]"
            for rank, names in sorted(missing.items())
        ),
    ]
    if fatal:
        lines.append(
            'One or more rank (marked by "!") is stalled for longer than '
            f"{shutdown_s:g} seconds. Will shutdown."
        )
    lines += _what_they_did(missing, answers)
    return Verdict("\n".join(lines), is_fatal=bool(fatal))


def _late_names(answers: Mapping[int, Pending], warning_s: float) -> dict[str, float]:
    """Return the names that some rank has waited for, and for how long at most."""
    late: dict[str, float] = {}
    for answer in answers.values():
        for name, age_s in zip(answer.names, answer.ages_s, strict=True):
            if age_s >= warning_s:
                late[name] = max(age_s, late.get(name, 0.0))
    return late


def _what_they_did(
    missing: Mapping[int, Sequence[str]], answers: Mapping[int, Pending]
) -> list[str]:
    """Say what the missing ranks have submitted instead; like ranks on one line."""
    ranks_by_doing: dict[str, int] = {}
    for rank in missing:
        answer = answers.get(rank)
        if answer is None:
            doing = "gave no answer: stopped, or too busy for its other threads to run"
        elif answer.names:
            doing = f"submitted [{_show(answer.names)}] and waits for that"
        else:
            doing = "submitted nothing that is not done"
        ranks_by_doing[doing] = ranks_by_doing.get(doing, 0) | 1 << rank
    return [f"{format_ranks(ranks)} {doing}" for doing, ranks in ranks_by_doing.items()]


def _show(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} ..." if len(names) > _NAMES_SHOWN else shown
