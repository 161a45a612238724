"""One check: what it reads, where its threshold comes from, and what to do."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ronde.check.facts import HostFacts, Value
from ronde.check.fleet import Fleet, spell


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
    """Return how two hosts are named where neither is to blame by itself."""
    return f"{host}{_BETWEEN}{other}"


class Check(NamedTuple):
    """One thing that is judged.

    Attributes:
        id: Its name, in words joined by hyphens: ``locked-memory``.
        family: What it is about.
        title: What it asks, in half a sentence.
        reads: What it looks at, for people.
        threshold: What is good enough, for people.
        source: Where the threshold comes from.
        severity: The worst that it says.
        fix: What to do or type.
        needs: What it cannot do without: a GPU, root, several hosts; empty for nothing.
        why: What happens to training otherwise.
        facts: Names of the facts that it needs of a host; it is ``unreadable`` there
            without any one of them, and is not asked about.
        judge: Yields what it finds, of all hosts that have the facts.
        besides: Names of facts of other probes or steps that it takes into account
            where they are known.
    """

    id: str
    family: Family
    title: str
    reads: str
    threshold: str
    source: str
    severity: Severity
    fix: str
    needs: str
    why: str
    facts: tuple[str, ...]
    judge: Callable[[Fleet], Iterator[Finding]]
    besides: tuple[str, ...] = ()


def alike(
    name: str,
    severity: Severity,
    fact: str,
    title: str,
    show: Callable[[Value], str] = spell,
) -> Callable[[Fleet], Iterator[Finding]]:
    """Return a judge that finds hosts in which a fact is not what most have.

    Of two hosts, or in a draw, nobody is blamed: each host is told with its value.

    Args:
        name: Id of the check.
        severity: Of what it finds.
        fact: The fact's name.
        title: What the value is, for people: ``torch``.
        show: Writes a value for people; what it writes alike is alike.
    """

    def judge(fleet: Fleet) -> Iterator[Finding]:
        for host, value, usual in fleet.odd_ones(fact, show):
            yield Finding(name, severity, host, f"{title} {value}", usual)

    return judge


def describe(facts: HostFacts, names: tuple[str, ...]) -> str | None:
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
