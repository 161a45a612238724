"""Whether this process is about to end with a failure, for what runs at its end.

Note [The exit code at exit]
    An uncaught exception leaves ``sys.last_value``, but a SystemExit leaves nothing.
    Its ``code`` is read by the interpreter itself, though, from no Python frame: so
    ``sys.exit`` is made to raise a SystemExit that notices this. The code of a program
    that raises SystemExit itself is not seen.
"""

import _sitebuiltins
import sys
import threading
from typing import NoReturn

_codes: list[object] = []


def is_failing() -> bool:
    """Return, at exit, whether an exception or ``sys.exit`` ends the process badly."""
    return hasattr(sys, "last_value") or any(
        code is not None and code != 0 for code in _codes
    )


def watch_exit() -> None:
    """Record exit codes from now on; see Note [The exit code at exit]."""
    sys.exit = _exit
    # By which exit() and quit() leave.
    _sitebuiltins.__dict__["SystemExit"] = _SystemExit


class _SystemExit(SystemExit):
    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "code" and _is_asked_by_interpreter():
            _codes.append(value)
        return value


def _exit(status: object = None, /) -> NoReturn:
    # Threads forgive nothing but SystemExit itself.
    is_main = threading.current_thread() is threading.main_thread()
    raise (_SystemExit if is_main else SystemExit)(status)


def _is_asked_by_interpreter() -> bool:
    try:
        # This function's, that of ``__getattribute__``, and the one that asks.
        sys._getframe(2)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    except ValueError:
        return True
    return False
