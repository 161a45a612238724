"""One check: what it reads, where its threshold comes from, what to do, its judge.

A check is a function below a decorator: ``check`` for all hosts together,
``each_host`` for one host after the other, ``same_everywhere`` for one fact, and
``gpu.judges.each_gpu``. Its name is the check's id. Its docstring is the title and a
paragraph ``name: text`` for each of ``reads``, ``threshold``, ``source``, ``fix``,
``needs`` and ``why``. ``catalogue`` finds it in its module.
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
    find_odd,
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
    """How bad a finding is."""

    # Training would fail, or crawl.
    FAIL = "fail"
    # Training may be slower, or fail some day.
    WARN = "warn"
    # Worth knowing.
    INFORM = "inform"


FAIL, WARN, INFORM = Severity

_BETWEEN = " - "


class Finding(NamedTuple):
    """What one check found on one host, or between two."""

    check: str
    severity: Severity
    # Where; of two hosts what ``name_pair`` returns.
    host: str
    # What is seen, without a subject: ``/dev/shm has 64MiB``.
    what: str
    # What most other hosts have; empty where that is not the point.
    usual: str = ""
    # What to do or type, where it is more exact than the check's own.
    fix: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.host.split(_BETWEEN))


def name_pair(host: str, other: str) -> str:
    return f"{host}{_BETWEEN}{other}"


def name_some(names: Mapping[str, object] | list[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    named, num_more = list(names)[:most], len(names) - most
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "")


class Problem(NamedTuple):
    """What a judge finds: a ``Finding`` whose check is known from the judge."""

    what: str
    # None for the check's own.
    severity: Severity | None = None
    usual: str = ""
    fix: str = ""
    # Where; filled in for a judge of one host.
    host: str = ""


Problems = Iterator[Problem]
Judge = Callable[[Fleet], Problems]


class Check(NamedTuple):
    """One thing that is judged; the texts are for people."""

    id: str
    family: Family
    # The worst that it finds, and of each problem that has no severity.
    severity: Severity
    title: str
    reads: str
    threshold: str
    source: str
    fix: str
    needs: str
    why: str
    # Facts that it needs of a host; without one of them it is not made there.
    facts: tuple[str, ...]
    judge: Judge
    # Facts that it takes into account where they are known.
    besides: tuple[str, ...] = ()

    def find(self, fleet: Fleet) -> Iterator[Finding]:
        for each in self.judge(fleet):
            what, severity, usual, fix, host = each
            yield Finding(self.id, severity or self.severity, host, what, usual, fix)


_FIELDS = ("reads", "threshold", "source", "fix", "needs", "why")


def check(
    family: Family, severity: Severity, *facts: str, besides: tuple[str, ...] = ()
) -> Callable[[Judge], Check]:
    """Make a judge of all hosts a check."""
    return lambda judge: make_check(judge, judge, family, severity, facts, besides)


def make_check(
    named: Callable[..., object],
    judge: Judge,
    family: Family,
    severity: Severity,
    facts: tuple[str, ...],
    besides: tuple[str, ...] = (),
) -> Check:
    """Return a check with the name and the texts of a function."""
    # Under python -OO there are no texts, and the checks are made all the same.
    title, *lines = (named.__doc__ or "\n").splitlines()
    # A sentence there, a part of one in lists.
    title = title.removesuffix(".")
    title = title if title[1:2].isupper() else title[:1].lower() + title[1:]
    fields: dict[str, str] = dict.fromkeys(_FIELDS, "")
    last = ""
    for line in filter(None, map(str.strip, lines)):
        begin, _, rest = line.partition(": ")
        if begin in _FIELDS:
            fields[begin], last = rest, begin
        else:
            fields[last] += f" {line}"
    name = named.__name__.replace("_", "-")
    return Check(
        name,
        family,
        severity,
        title,
        **fields,
        facts=facts,
        judge=judge,
        besides=besides,
    )


def each_host(
    family: Family, severity: Severity, *facts: str, besides: tuple[str, ...] = ()
) -> Callable[[Callable[[Values, Fleet], Problems]], Check]:
    """Make a judge of one host's values a check."""

    def make(judge: Callable[[Values, Fleet], Problems]) -> Check:
        def judge_all(fleet: Fleet) -> Problems:
            for host in fleet.having(*facts):
                for problem in judge(host.values, fleet):
                    yield problem._replace(host=host.host)

        return make_check(judge, judge_all, family, severity, facts, besides)

    return make


def same_everywhere(
    family: Family, severity: Severity, fact: str, title: str
) -> Callable[[Callable[[Value], str]], Check]:
    """Make a check that finds hosts in which a fact is not what most have.

    The function below it writes a value for people; what it writes alike is alike.
    """

    def make(show: Callable[[Value], str]) -> Check:
        def judge(fleet: Fleet) -> Problems:
            return differing(fleet, fact, title, show)

        return make_check(show, judge, family, severity, (fact,))

    return make


def differing(
    fleet: Fleet, fact: str, title: str, show: Callable[[Value], str] = spell
) -> Problems:
    """Yield the hosts in which a fact is not what most have; of only two, both."""
    shown = {host: show(value) for host, value in fleet.known(fact).items()}
    for host, value, usual in find_odd(shown):
        yield Problem(f"{title} {value}", usual=usual, host=host)


def having_less(
    amounts: Mapping[str, float], show: Callable[[float], str], share: float = 1.0
) -> Problems:
    """Yield the hosts that have less of something than a share of what most have."""
    few = find_few(amounts, share)
    for host in few.hosts:
        usual = show_usual(host, amounts, few, show)
        yield Problem(show(amounts[host]), Severity.WARN, usual, host=host)


def once_a_host(*problems: Problems) -> Problems:
    """Yield of each host what the first of some judges finds."""
    known: set[str] = set()
    for each in problems:
        found = [problem for problem in each if problem.host not in known]
        known |= {problem.host for problem in found}
        yield from found


def why_unread(facts: HostFacts, names: tuple[str, ...]) -> str | None:
    """Return why a check cannot be made on a host; None where it can be made.

    Empty where nobody has looked, for there is nothing to look at: what only several
    hosts have, on one.
    """
    for name in names:
        if name not in facts.values:
            # Of a probe that gave nothing, what all its facts begin with is named.
            of_probe = f"{name.partition('.')[0]}."
            return facts.unreadable.get(name) or facts.unreadable.get(of_probe, "")
    return None
