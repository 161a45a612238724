"""One thing that all hosts do at the same time, so that facts of them are known."""

from collections.abc import Callable
from typing import NamedTuple

from ronde.check.steps.panel import Panel


class Step(NamedTuple):
    """A step, which is left out where nobody wants its facts.

    Attributes:
        name: For people.
        run: Has the hosts do it, and writes the facts down.
        facts: Names of the facts that it may write down.
        reads: Names of facts of others that it takes into account.
        setting: What the user must have asked for; empty for nothing.
    """

    name: str
    run: Callable[[Panel], None]
    facts: tuple[str, ...]
    reads: tuple[str, ...] = ()
    setting: str = ""
