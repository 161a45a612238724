"""Facts of hosts, and the checks that judge them.

A check is a function below ``check`` (it judges all hosts together), ``each_host``,
``same_everywhere`` or ``gpu.judges.each_gpu``. Its name is the id. Its docstring is the
title and a paragraph ``name: text`` for each of ``reads``, ``threshold``, ``source``,
``fix``, ``needs`` and ``why``. ``catalogue`` finds it in its module.
"""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

# Setting: what ``ronde run`` would forward to every host, by the variable's name.
ENVIRONMENT = "environment"
# With fewer hosts there is no majority.
MIN_MAJORITY = 3
# What JSON can hold.
Value = Any
Values = Mapping[str, Value]
HostPair = tuple[str, str]


class HostFacts(NamedTuple):
    """All that is known of one host."""

    host: str
    # By the fact's name, such as ``host.memlock_bytes``.
    values: dict[str, Value]
    # By the fact's name: why it could not be read, and what would help.
    unreadable: dict[str, str]
    # By the probe's name: how long it took.
    seconds: dict[str, float]


class Fleet(NamedTuple):
    """The hosts, in the user's order, and what the user asked for."""

    hosts: tuple[HostFacts, ...]
    settings: dict[str, Value]

    @property
    def num_ranks(self) -> int:
        return int(self.settings.get("num_ranks") or 1)

    def having(self, *names: str) -> Iterator[HostFacts]:
        """Yield the hosts of which all these facts are known."""
        for facts in self.hosts:
            if all(name in facts.values for name in names):
                yield facts

    def known(self, name: str) -> dict[str, Value]:
        return {facts.host: facts.values[name] for facts in self.having(name)}


class UnreadableError(Exception):
    """A fact cannot be read; the message is the reason, without a subject."""


class FactReader:
    """Facts as a probe finds them, and why others cannot be read."""

    def __init__(self, settings: dict[str, Value]) -> None:
        self.settings = settings
        # Where proc and sys are; empty for this machine.
        self.root = str(settings.get("root", "/")).rstrip("/")
        self.values: dict[str, Value] = {}
        self.unreadable: dict[str, str] = {}

    def keep(self, name: str, read: Callable[[], Value]) -> None:
        with self.reading(name):
            self.values[name] = read()

    @contextmanager
    def reading(self, *names: str) -> Generator[None]:
        """Store these facts as unreadable if the block cannot read them."""
        try:
            yield
        except UnreadableError as error:
            reason = str(error)
        except PermissionError as error:
            reason = f"{error.filename or error}: permission denied; root would help"
        except OSError as error:
            reason = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            reason = f"its form is unknown: {error!r}"
        else:
            return
        self.unreadable |= dict.fromkeys(names, reason)


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
    # Training may be slower, or fail later.
    WARN = "warn"
    # Worth knowing.
    INFORM = "inform"


FAIL, WARN, INFORM = Severity

_BETWEEN = " - "


class Finding(NamedTuple):
    """What one check found on one host, or between two."""

    check: str
    severity: Severity
    # Where; for two hosts what ``name_pair`` returns.
    host: str
    # Without a subject: ``/dev/shm has 64MiB``.
    what: str
    # What most other hosts have, if that is the point.
    usual: str = ""
    # What to do or type, if it is more exact than the check's own.
    fix: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.host.split(_BETWEEN))


class Problem(NamedTuple):
    """What a judge finds; its check completes it to a ``Finding``."""

    what: str
    # None for the check's own.
    severity: Severity | None = None
    usual: str = ""
    fix: str = ""
    # Filled in for a judge of one host.
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
    # Facts of a host without which the check is not made there.
    facts: tuple[str, ...]
    judge: Judge
    # Facts that it uses where they are known.
    besides: tuple[str, ...] = ()

    def find(self, fleet: Fleet) -> Iterator[Finding]:
        for what, severity, usual, fix, host in self.judge(fleet):
            yield Finding(self.id, severity or self.severity, host, what, usual, fix)


_FIELDS = ("reads", "threshold", "source", "fix", "needs", "why")


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
    texts: dict[str, str] = dict.fromkeys(_FIELDS, "")
    last = ""
    for line in filter(None, map(str.strip, lines)):
        begin, _, rest = line.partition(": ")
        if begin in _FIELDS:
            texts[begin], last = rest, begin
        else:
            texts[last] += f" {line}"
    name = named.__name__.replace("_", "-")
    given: tuple[str, Family, Severity, str] = (name, family, severity, title)
    return Check(*given, **texts, facts=facts, judge=judge, besides=besides)


def check(
    family: Family, severity: Severity, *facts: str, besides: tuple[str, ...] = ()
) -> Callable[[Judge], Check]:
    """Make a judge of all hosts a check."""
    return lambda judge: make_check(judge, judge, family, severity, facts, besides)


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
    """Make a check of a function that shows a value: all hosts should show the same."""
    return lambda show: make_check(
        show,
        lambda fleet: differing(fleet, fact, title, show),
        family,
        severity,
        (fact,),
    )


def name_pair(host: str, other: str) -> str:
    return f"{host}{_BETWEEN}{other}"


def name_some(names: Mapping[str, object] | list[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    named, num_more = list(names)[:most], len(names) - most
    return ", ".join(named) + (f" and {num_more} more" if num_more > 0 else "")


def spell(value: Value) -> str:
    """Return a value as people read it, equal ones alike."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, bool):
        return "on" if value else "off"
    return json.dumps(value, sort_keys=True)


def find_odd(
    shown: Mapping[str, str], of: str = "hosts"
) -> Iterator[tuple[str, str, str]]:
    """Yield hosts that differ, with value and what most have; in a draw all."""
    counts = Counter(shown.values())
    if len(counts) < 2:
        return
    (usual, most), (_, second) = counts.most_common(2)
    is_draw = most == second or len(shown) < MIN_MAJORITY
    for host, value in shown.items():
        if is_draw:
            others = [v for v in counts if v != value]
            yield host, value, f"{', '.join(others)} elsewhere"
        elif value != usual:
            yield host, value, f"{usual} on {most} {of}"


def differing(
    fleet: Fleet, fact: str, title: str, show: Callable[[Value], str] = spell
) -> Problems:
    """Yield the hosts in which a fact is not what most have; with only two, both."""
    shown = {host: show(value) for host, value in fleet.known(fact).items()}
    for host, value, usual in find_odd(shown):
        yield Problem(f"{title} {value}", usual=usual, host=host)


class Few(NamedTuple):
    """Hosts that have too little of something; in a draw, all."""

    hosts: tuple[str, ...]
    # What most hosts have; in a draw, the most that any of them has.
    usual: float
    is_draw: bool


def find_few(amounts: Mapping[str, float], share: float) -> Few:
    """Find those with less than a share of the upper median; of two it is a draw."""
    if not amounts:
        return Few((), 0.0, is_draw=False)
    usual = statistics.median_high(amounts.values())
    few = tuple(host for host, amount in amounts.items() if amount < share * usual)
    if few and 2 * len(few) >= len(amounts):
        return Few(tuple(amounts), max(amounts.values()), is_draw=True)
    return Few(few, usual, is_draw=False)


def show_usual(
    host: str, amounts: Mapping[str, float], few: Few, show: Callable[[float], str]
) -> str:
    """Return what other hosts have, for ``Finding.usual``."""
    if not few.is_draw:
        return f"{show(few.usual)} on most hosts"
    others = {show(a): None for name, a in amounts.items() if name != host}
    return f"{', '.join(others)} elsewhere"


def having_less(
    amounts: Mapping[str, float], show: Callable[[float], str], share: float = 1.0
) -> Problems:
    """Yield the hosts that have less of something than a share of what most have."""
    few = find_few(amounts, share)
    for host in few.hosts:
        usual = show_usual(host, amounts, few, show)
        yield Problem(show(amounts[host]), Severity.WARN, usual, host=host)


def once_a_host(*problems: Problems) -> Problems:
    """Yield for each host what the first of some judges finds."""
    known: set[str] = set()
    for each in problems:
        found = [problem for problem in each if problem.host not in known]
        known |= {problem.host for problem in found}
        yield from found
