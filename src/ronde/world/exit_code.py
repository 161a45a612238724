"""The exit code of this process, for functions that run at its exit.

Note [The exit code at exit]
    An uncaught exception is left in ``sys.last_value``; a SystemExit is not. But the
    interpreter reads the ``code`` of a SystemExit after the last Python frame has
    ended. So the replaced ``sys.exit`` raises a SystemExit that records this reading.
    If a program raises SystemExit itself, its exit code is unknown.
"""

import _sitebuiltins
import sys
import threading
from typing import NoReturn

_codes: list[object] = []


def is_failing() -> bool:
    """Return True if an exception or a failing ``sys.exit`` caused the running exit."""
    return hasattr(sys, "last_value") or any(
        code is not None and code != 0 for code in _codes
    )


def watch_exit() -> None:
    """Start recording exit codes; see Note [The exit code at exit]."""
    sys.exit = _exit
    # exit() and quit() raise this one.
    _sitebuiltins.__dict__["SystemExit"] = _SystemExit


class _SystemExit(SystemExit):
    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "code" and _is_asked_by_interpreter():
            _codes.append(value)
        return value


def _exit(status: object = None, /) -> NoReturn:
    # A thread prints a traceback for any other class than SystemExit itself.
    is_main = threading.current_thread() is threading.main_thread()
    raise (_SystemExit if is_main else SystemExit)(status)


def _is_asked_by_interpreter() -> bool:
    try:
        # The frames of this function, of ``__getattribute__``, and of the caller.
        sys._getframe(2)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    except ValueError:
        return True
    return False
