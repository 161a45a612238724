"""The checks that judge the facts of hosts, and what they find.

A check is a function below ``check`` (it judges all hosts together), ``each_host``,
``same_everywhere`` or ``each_gpu``. Its name is the id. Its docstring is the title and
a paragraph ``name: text`` for each of ``reads``, ``threshold``, ``source``, ``fix``,
``needs`` and ``why``. Its family is what its first fact begins with, such as
``host.``, unless it names another. ``catalogue`` finds it in its module.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ronde.check.fleet import Fleet, Values


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

    FAIL = "fail"  # training would fail, or crawl
    WARN = "warn"  # training may be slower, or fail later
    INFORM = "inform"  # worth knowing


FAIL, WARN, INFORM = Severity

_BETWEEN = " - "


class Finding(NamedTuple):
    """What one check found on one host, or between two."""

    check: str
    severity: Severity
    host: str  # for two hosts what ``name_pair`` returns
    message: str  # without a subject: ``/dev/shm has 64MiB``
    usual: str = ""  # what most other hosts have, if that is the point
    fix: str = ""  # what to do or type

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.host.split(_BETWEEN))


class Problem(NamedTuple):
    """What a judge finds; its check completes it to a ``Finding``."""

    message: str
    severity: Severity | None = None  # None for the check's own
    usual: str = ""
    fix: str = ""  # if more exact than the check's own
    host: str = ""  # filled in for a judge of one host


Problems = Iterator[Problem]
Judge = Callable[[Fleet], Problems]


class Check(NamedTuple):
    """One thing that is judged; the texts are for people."""

    id: str
    family: Family
    severity: Severity  # the worst that it finds, and of a problem that has none
    title: str
    reads: str
    threshold: str
    source: str
    fix: str
    needs: str
    why: str
    facts: tuple[str, ...]  # without one of them the check is not made on a host
    judge: Judge
    besides: tuple[str, ...] = ()  # facts that it uses where they are known

    def find(self, fleet: Fleet) -> Iterator[Finding]:
        for message, severity, usual, fix, host in self.judge(fleet):
            how_bad = severity or self.severity
            # What is only worth knowing needs no cure.
            cure = fix or (self.fix if how_bad is not INFORM else "")
            yield Finding(self.id, how_bad, host, message, usual, cure)


_FIELDS = ("reads", "threshold", "source", "fix", "needs", "why")


def make_check(
    named: Callable[..., object],
    judge: Judge,
    severity: Severity,
    facts: tuple[str, ...],
    besides: tuple[str, ...] = (),
    family: Family | None = None,
) -> Check:
    """Return a check with the name and the texts of a function."""
    # Under python -OO there are no texts, and the checks are made all the same.
    title, *lines = (named.__doc__ or "\n").splitlines()
    # A sentence there, a part of one in lists.
    title = title.removesuffix(".")
    title = title if title[1:2].isupper() else title[:1].lower() + title[1:]
    texts: dict[str, str] = dict.fromkeys(_FIELDS, "")
    last = ""
    for line in filter(None, map(str.strip, lines)):
        begin, _, rest = line.partition(": ")
        if begin in _FIELDS:
            texts[begin], last = rest, begin
        else:
            texts[last] += f" {line}"
    name = named.__name__.replace("_", "-")
    family = family or Family(facts[0].partition(".")[0])
    given: tuple[str, Family, Severity, str] = (name, family, severity, title)
    return Check(*given, **texts, facts=facts, judge=judge, besides=besides)


def check(
    severity: Severity,
    *facts: str,
    besides: tuple[str, ...] = (),
    family: Family | None = None,
) -> Callable[[Judge], Check]:
    """Make a judge of all hosts a check."""
    return lambda judge: make_check(judge, judge, severity, facts, besides, family)


def each_host(
    severity: Severity, *facts: str, besides: tuple[str, ...] = ()
) -> Callable[[Callable[[Values, Fleet], Problems]], Check]:
    """Make a judge of one host's values a check."""

    def make(judge: Callable[[Values, Fleet], Problems]) -> Check:
        def judge_all(fleet: Fleet) -> Problems:
            for host in fleet.having(*facts):
                for problem in judge(host.values, fleet):
                    yield problem._replace(host=host.host)

        return make_check(judge, judge_all, severity, facts, besides)

    return make


def name_pair(host: str, other: str) -> str:
    return f"{host}{_BETWEEN}{other}"
