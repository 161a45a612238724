"""The command ``ronde``, and ``python -m ronde``.

Signal handlers are set before other imports: else a signal would end Python in the
middle of an import, with a traceback and another exit code.
"""

import os
import signal
import sys

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    before = {
        number: signal.signal(number, lambda number, _frame: os._exit(128 + number))
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    from ronde.cli import main as run_command

    # These two set their own handlers before they start processes.
    if sys.argv[1:2] not in (["run"], ["horovodrun"]):
        for number, handler in before.items():
            signal.signal(number, handler)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
