"""What is known of a host: values that JSON can hold, and what could not be read."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

ENVIRONMENT = "environment"
"""Setting: what ``ronde run`` would forward to every host, by the variable's name."""

Value = Any
"""A number, a text, a truth, or lists and objects of these, as JSON has them."""


class HostFacts(NamedTuple):
    """All that is known of one host.

    Attributes:
        host: Its name, as the user gave it.
        values: By the fact's name, such as ``host.memlock_bytes``.
        unreadable: By the fact's name: why it could not be read, and what would help.
        seconds: By the probe's name: how long it took.
    """

    host: str
    values: dict[str, Value]
    unreadable: dict[str, str]
    seconds: dict[str, float]


class UnreadableError(Exception):
    """A fact cannot be read.

    Args:
        reason: Why, in half a sentence; and what would help, if anything would.
    """


class Reading:
    """Facts as a probe finds them; what cannot be read is taken down as that.

    Args:
        settings: What the user said that probes are to know: ``paths``, ``num_ranks``
            and the like.
    """

    def __init__(self, settings: dict[str, Value]) -> None:
        self.settings = settings
        self.values: dict[str, Value] = {}
        self.unreadable: dict[str, str] = {}

    def keep(self, name: str, read: Callable[[], Value]) -> None:
        """Take down what ``read`` returns, or why it could not be read.

        A file that is not there and one that may not be read are both unreadable; a
        probe to which absence means something looks for itself.
        """
        with self.reading(name):
            self.values[name] = read()

    @contextmanager
    def reading(self, *names: str) -> Generator[None]:
        """Take down these facts as unreadable if the block cannot read them."""
        try:
            yield
        except UnreadableError as error:
            reason = str(error)
        except PermissionError as error:
            reason = f"{error.filename or error}: permission denied; root would help"
        except OSError as error:
            reason = f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            reason = f"it is not of the form that is known: {error!r}"
        else:
            return
        self.unreadable |= dict.fromkeys(names, reason)
