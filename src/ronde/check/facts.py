"""Facts of hosts: values that JSON can hold, and why others could not be read."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

# Setting: what ``ronde run`` would forward to every host, by the variable's name.
ENVIRONMENT = "environment"
# With fewer hosts there is no majority.
MIN_MAJORITY = 3
# A number, a text, a truth, or lists and objects of these, as JSON has them.
Value = Any
Values = Mapping[str, Value]


class HostFacts(NamedTuple):
    """All that is known of one host."""

    host: str
    # By the fact's name, such as ``host.memlock_bytes``.
    values: dict[str, Value]
    # By the fact's name: why it could not be read, and what would help.
    unreadable: dict[str, str]
    # By the probe's name: how long it took.
    seconds: dict[str, float]


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
    """Yield each host that differs, with its value and what most others have.

    In a draw, or with only two, all are odd: each is shown with its value.
    """
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


class Few(NamedTuple):
    """Hosts that have too little of something; in a draw, all."""

    hosts: tuple[str, ...]
    # What most hosts have; in a draw, the most that any of them has.
    usual: float
    is_draw: bool


def find_few(amounts: Mapping[str, float], share: float) -> Few:
    """Find the hosts that have less than a share of the upper median.

    To have more is no fault. Where as many have little as have much, it is a draw; with
    only two hosts it always is.
    """
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
