"""The definition of a check: a rule that finds problems in the facts of hosts.

A check is a function with the decorator ``check`` (for all hosts together),
``each_host``, ``same_everywhere`` or ``each_gpu``. The function's name becomes the id.
Its docstring consists of the title and a paragraph ``name: text`` for each of
``reads``, ``threshold``, ``source``, ``fix``, ``needs``, ``why``, and perhaps ``pod``:
the fix in a pod of Kubernetes, without root. The default source is "ronde's
choice", and the default family the prefix of the first fact, such as ``host.``.
``catalogue`` lists the modules with checks.
"""

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ronde.check.fleet import Fleet, Values


class Family(StrEnum):
    """A group of checks, which is a column in the table of hosts."""

    VERSIONS = "versions"
    GPU = "gpu"
    HOST = "host"
    NETWORK = "network"
    STORAGE = "storage"
    CLUSTER = "cluster"


class Severity(StrEnum):
    """The effect of a finding on training."""

    FAIL = "fail"  # training would fail, or be very slow
    WARN = "warn"  # training may be slower, or fail later
    INFORM = "inform"  # worth knowing


FAIL, WARN, INFORM = Severity
IN_POD = "probe.in_pod"  # fact: True in a pod of Kubernetes

_NOT_IN_PODS = re.compile(
    "docker run|--device|ulimit|remount|sudo |as root|umount|nft |ip link"
)
_BETWEEN = " - "


class Finding(NamedTuple):
    """A problem on one host or between two hosts, and the check that found it."""

    check: str
    severity: Severity
    host: str  # for two hosts the result of ``name_pair``
    message: str  # such as ``/dev/shm has 64MiB``
    usual: str = ""  # the value of most other hosts, if the host differs from them
    fix: str = ""  # a command or an instruction

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.host.split(_BETWEEN))


class Problem(NamedTuple):
    """A problem that the function of a check yields; it becomes a ``Finding``."""

    message: str
    severity: Severity | None = None  # default: the check's
    usual: str = ""
    fix: str = ""  # default: the check's
    host: str = ""  # set by ``each_host`` and ``each_gpu``


Problems = Iterator[Problem]
Judge = Callable[[Fleet], Problems]


class Check(NamedTuple):
    """A rule for hosts, with the texts that ``explain`` and docs/checks.md show."""

    id: str
    family: Family
    severity: Severity  # the worst possible, and the default of its problems
    title: str
    reads: str
    threshold: str
    source: str
    fix: str
    needs: str
    why: str
    facts: tuple[str, ...]  # all required; a host without one of them is skipped
    judge: Judge
    optional: tuple[str, ...] = ()  # optional facts
    pod: str = ""  # the fix in a pod

    def find(self, fleet: Fleet) -> Iterator[Finding]:
        in_pods = fleet.known(IN_POD)
        for message, severity, usual, fix, host in self.judge(fleet):
            level = severity or self.severity
            cure = fix or (self.fix if level is not INFORM else "")
            if host in in_pods and _NOT_IN_PODS.search(cure):
                cure = self.pod or f"On the pod's node: {cure}"
            yield Finding(self.id, level, host, message, usual, cure)


_FIELDS = ("reads", "threshold", "source", "fix", "needs", "why", "pod")


def make_check(
    named: Callable[..., object],
    judge: Judge,
    severity: Severity,
    facts: tuple[str, ...],
    optional: tuple[str, ...] = (),
    family: Family | None = None,
) -> Check:
    # Under python -OO there are no docstrings; checks work without them.
    title, *lines = (named.__doc__ or "\n").splitlines()
    # A sentence in the docstring, part of a line in ``ronde check list``.
    title = title.removesuffix(".")
    title = title if title[1:2].isupper() else title[:1].lower() + title[1:]
    texts: dict[str, str] = dict.fromkeys(_FIELDS, "")
    texts["source"] = "ronde's choice"
    last = ""
    for line in filter(None, map(str.strip, lines)):
        begin, _, rest = line.partition(": ")
        if begin in _FIELDS:
            texts[begin], last = rest, begin
        else:
            texts[last] += f" {line}"
    return Check(
        named.__name__.replace("_", "-"),
        family or Family(facts[0].partition(".")[0]),
        severity,
        title,
        **texts,
        facts=facts,
        judge=judge,
        optional=optional,
    )


def check(
    severity: Severity,
    *facts: str,
    optional: tuple[str, ...] = (),
    family: Family | None = None,
) -> Callable[[Judge], Check]:
    """Return a decorator for a function that yields the problems of all hosts."""
    return lambda judge: make_check(judge, judge, severity, facts, optional, family)


def each_host(
    severity: Severity, *facts: str, optional: tuple[str, ...] = ()
) -> Callable[[Callable[[Values, Fleet], Problems]], Check]:
    """Return a decorator for a function that yields the problems of one host."""

    def make(judge: Callable[[Values, Fleet], Problems]) -> Check:
        def judge_all(fleet: Fleet) -> Problems:
            for host in fleet.having(*facts):
                for problem in judge(host.values, fleet):
                    yield problem._replace(host=host.host)

        return make_check(judge, judge_all, severity, facts, optional)

    return make


def name_pair(host: str, other: str) -> str:
    return f"{host}{_BETWEEN}{other}"
