"""Judges of what each GPU answers: alike GPUs of a host are told in one finding."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ronde.check.check import Finding, Severity
from ronde.check.facts import HostFacts, Value
from ronde.check.fleet import Fleet
from ronde.topology.cpu_sets import format_list

TITLES = "gpu.titles"


class Trouble(NamedTuple):
    """What is wrong with a GPU.

    Attributes:
        severity: How bad.
        what: In half a sentence.
        fix: What to do, where that is more exact than the check's own.
        usual: What most others have.
    """

    severity: Severity
    what: str
    fix: str = ""
    usual: str = ""


def name_gpus(numbers: list[int]) -> str:
    """Return numbers as people read them: ``GPU 3``, ``GPUs 0-3,7``."""
    return f"GPU{'s' * (len(numbers) > 1)} {format_list(numbers)}"


def tell(check: str, facts: HostFacts, troubles: list[Trouble]) -> Iterator[Finding]:
    """Yield the findings of a host's GPUs, one for those in the same trouble.

    Args:
        check: Its id.
        facts: Of the host.
        troubles: Of each GPU, in order; one without ``what`` has none.
    """
    alike: dict[Trouble, list[int]] = defaultdict(list)
    for number, trouble in enumerate(troubles):
        alike[trouble].append(number)
    for trouble, numbers in alike.items():
        if trouble.what:
            what = f"{name_gpus(numbers)}: {trouble.what}"
            yield Finding(
                check, trouble.severity, facts.host, what, trouble.usual, trouble.fix
            )


FINE = Trouble(Severity.INFORM, "")
"""No trouble."""


def each_gpu(
    check: str, fact: str, judge_one: Callable[[Value], Trouble]
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that looks at each GPU by itself.

    Args:
        check: Its id.
        fact: A list with an answer for each GPU; nothing where it does not apply.
        judge_one: Returns what is wrong with a GPU by its answer, or ``FINE``.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        for facts in fleet.having(fact):
            answers = facts.values[fact] or ()
            troubles = [FINE if a is None else judge_one(a) for a in answers]
            yield from tell(check, facts, troubles)

    return judge


def odd_gpus(
    check: str,
    severity: Severity,
    fact: str,
    show: Callable[[Value], str],
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that finds GPUs that are not as most of their model are.

    All GPUs of all hosts are counted. Of two, or in a draw, none is odd.

    Args:
        check: Its id.
        severity: Of what it finds.
        fact: A list with an answer for each GPU; nothing where it does not apply.
        show: Writes what is to be equal, for people; empty for what does not count.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        shown: dict[str, list[tuple[str, str]]] = {}
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for facts in fleet.having(fact, TITLES):
            pairs = zip(facts.values[TITLES], facts.values[fact], strict=True)
            of_host = [(str(title), "" if a is None else show(a)) for title, a in pairs]
            shown[facts.host] = of_host
            for title, value in of_host:
                if value:
                    counts[title][value] += 1
        usual = {title: _majority(counter) for title, counter in counts.items()}
        for facts in fleet.having(fact, TITLES):
            troubles = [
                _odd(severity, value, usual.get(title, ""))
                for title, value in shown[facts.host]
            ]
            yield from tell(check, facts, troubles)

    return judge


def _majority(counts: "Counter[str]") -> str:
    """Return what more than half have; empty where that is nothing."""
    value, most = counts.most_common(1)[0]
    return value if 2 * most > counts.total() else ""


def _odd(severity: Severity, value: str, usual: str) -> Trouble:
    if not value or not usual or value == usual:
        return FINE
    return Trouble(severity, value, usual=f"{usual} on most GPUs of this model")
