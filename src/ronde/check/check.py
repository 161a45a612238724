"""One check: what it reads, where its threshold comes from, what to do, its judge.

A check is a function below a decorator: ``check`` for all hosts together, ``each_host``
for one host after the other; ``gpu.judges`` has those for GPUs. The decorator makes it
a ``Check``, and ``catalogue`` finds it in its module.
"""

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from ronde.check.facts import (
    Fleet,
    HostFacts,
    Value,
    Values,
    find_few,
    show_usual,
    spell,
)


class Family(StrEnum):
    """What a check is about; a column of the table."""

    VERSIONS = "versions"
    GPU = "gpu"
    HOST = "host"
    NETWORK = "network"
    STORAGE = "storage"
    CLUSTER = "cluster"


class Severity(StrEnum):
    """How bad what a check finds is."""

    FAIL = "fail"
    """Training would fail, or crawl."""

    WARN = "warn"
    """Training may be slower, or fail some day."""

    INFORM = "inform"
    """Worth knowing."""


FAIL, WARN, INFORM = Severity

_BETWEEN = " - "


class Finding(NamedTuple):
    """What one check found on one host, or between two.

    Attributes:
        check: Id of the check.
        severity: How bad.
        host: Where; of two hosts what ``name_pair`` returns.
        what: What is seen, in half a sentence: ``/dev/shm has 64MiB``.
        usual: What most other hosts have; empty where that is not the point.
        fix: What to do or type, here: more exact than the check's own; else empty.
    """

    check: str
    severity: Severity
    host: str
    what: str
    usual: str = ""
    fix: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host, or both hosts of a pair."""
        return tuple(self.host.split(_BETWEEN))


def name_pair(host: str, other: str) -> str:
    """Return the name of two hosts between which there is a fault."""
    return f"{host}{_BETWEEN}{other}"


def name_some(names: Mapping[str, object] | list[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    named, num_more = list(names)[:most], len(names) - most
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "")


class Problem(NamedTuple):
    """What a judge finds; it becomes a ``Finding`` of its check.

    Attributes:
        what: As in ``Finding``.
        severity: None for the check's own.
        usual: As in ``Finding``.
        fix: As in ``Finding``.
        host: Where; filled in for a judge of one host.
    """

    what: str
    severity: Severity | None = None
    usual: str = ""
    fix: str = ""
    host: str = ""


Judge = Callable[[Fleet], Iterator[Problem]]


class Check(NamedTuple):
    """One thing that is judged.

    Attributes:
        id: Its name, in words joined by hyphens: ``locked-memory``.
        family: What it is about.
        severity: The worst that it finds, and of what says nothing else.
        title: What it asks, in half a sentence.
        reads: What it looks at, for people.
        threshold: What is good enough, for people.
        source: Where the threshold comes from.
        fix: What to do or type.
        needs: What it cannot do without: a GPU, root, several hosts; empty for nothing.
        why: What happens to training otherwise.
        facts: Names of the facts that it needs of a host; without one of them it is
            ``unreadable`` there.
        judge: Yields what it finds, of all hosts that have the facts.
        besides: Names of facts that it takes into account where they are known.
    """

    id: str
    family: Family
    severity: Severity
    title: str
    reads: str
    threshold: str
    source: str
    fix: str
    needs: str
    why: str
    facts: tuple[str, ...]
    judge: Judge
    besides: tuple[str, ...] = ()

    def find(self, fleet: Fleet) -> Iterator[Finding]:
        """Yield what is found on all hosts."""
        for each in self.judge(fleet):
            what, severity, usual, fix, host = each
            yield Finding(self.id, severity or self.severity, host, what, usual, fix)


_FIELDS = ("reads", "threshold", "source", "fix", "needs", "why")


def check(
    family: Family,
    severity: Severity,
    text: str,
    *facts: str,
    besides: tuple[str, ...] = (),
) -> Callable[[Judge], Check]:
    """Make a judge of all hosts a check.

    Args:
        family: What it is about.
        severity: The worst that it finds.
        text: ``id: title``, and a paragraph ``name: text`` for each further field.
        facts: See ``Check``.
        besides: See ``Check``.
    """
    head, *lines = text.strip().splitlines()
    name, _, title = head.partition(": ")
    fields, last = {"title": title, **dict.fromkeys(_FIELDS, "")}, "title"
    for line in map(str.strip, lines):
        begin, _, rest = line.partition(": ")
        if begin in _FIELDS:
            fields[begin], last = rest, begin
        else:
            fields[last] += f" {line}"

    def make(judge: Judge) -> Check:
        return Check(
            name, family, severity, **fields, facts=facts, judge=judge, besides=besides
        )

    return make


def each_host(
    family: Family,
    severity: Severity,
    text: str,
    *facts: str,
    besides: tuple[str, ...] = (),
) -> Callable[[Callable[[Values, Fleet], Iterator[Problem]]], Check]:
    """Make a judge of one host's values a check; see ``check``."""

    def make(judge: Callable[[Values, Fleet], Iterator[Problem]]) -> Check:
        def judge_all(fleet: Fleet) -> Iterator[Problem]:
            for host in fleet.having(*facts):
                for problem in judge(host.values, fleet):
                    yield problem._replace(host=host.host)

        return check(family, severity, text, *facts, besides=besides)(judge_all)

    return make


def differing(
    fleet: Fleet, fact: str, title: str, show: Callable[[Value], str] = spell
) -> Iterator[Problem]:
    """Yield the hosts in which a fact is not what most have; of only two, both."""
    for host, value, usual in fleet.odd_ones(fact, show):
        yield Problem(f"{title} {value}", usual=usual, host=host)


def same_everywhere(
    family: Family,
    severity: Severity,
    text: str,
    fact: str,
    title: str,
    show: Callable[[Value], str] = spell,
) -> Check:
    """Return a check that finds hosts in which a fact is not what most have.

    Args:
        family: See ``check``.
        severity: See ``check``.
        text: See ``check``.
        fact: The fact's name.
        title: What the value is, for people: ``torch``.
        show: Writes a value for people; what it writes alike is alike.
    """
    judge = check(family, severity, text, fact)
    return judge(lambda fleet: differing(fleet, fact, title, show))


def having_less(
    amounts: Mapping[str, float], show: Callable[[float], str], share: float = 1.0
) -> Iterator[Problem]:
    """Yield the hosts that have less of something than a share of what most have.

    Args:
        amounts: By the host's name.
        show: Writes an amount for people, with its unit and what it is of.
        share: See ``find_few``.
    """
    few = find_few(amounts, share)
    for host in few.hosts:
        usual = show_usual(host, amounts, few, show)
        yield Problem(show(amounts[host]), Severity.WARN, usual, host=host)


def once_a_host(*problems: Iterator[Problem]) -> Iterator[Problem]:
    """Yield of each host what the first of some judges finds."""
    known: set[str] = set()
    for each in problems:
        found = [problem for problem in each if problem.host not in known]
        known |= {problem.host for problem in found}
        yield from found


def why_unread(facts: HostFacts, names: tuple[str, ...]) -> str | None:
    """Return why a check cannot be made on a host.

    Returns:
        None where it can be made; empty where nobody has looked, for there is nothing
        to look at: what only several hosts have, on one.
    """
    for name in names:
        if name not in facts.values:
            # Of a probe that gave nothing, what all its facts begin with is named.
            of_probe = f"{name.partition('.')[0]}."
            unread = facts.unreadable
            return unread.get(name) or unread.get(of_probe, "")
    return None
