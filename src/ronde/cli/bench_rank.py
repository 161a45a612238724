"""One rank of ``ronde bench``: measures with the others; rank 0 tells."""

import os
import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager

import torch

from ronde.bench.exits import Exit
from ronde.bench.measured import Ending
from ronde.bench.options import Options
from ronde.bench.session import Session, open_session
from ronde.bench.variables import Variables
from ronde.cli.bench_teller import Teller
from ronde.errors import CollectiveError, UsageError
from ronde.units import format_size
from ronde.world import Claim


def run_rank(options: Options, variables: Variables, claim: Claim) -> int:
    """Take part in a benchmark; return the exit code, alike on all ranks.

    Raises:
        UsageError: Something asked for cannot be.
        CollectiveError: A collective failed.
    """
    teller = Teller(options, is_speaking=claim.rank == 0)
    try:
        session = open_session(claim, options, variables, teller.expired)
    except CollectiveError as error:
        raise UsageError(
            f"all {claim.size} ranks that {claim.launcher} speaks of must meet: {error}"
        ) from error
    with _stopping() as stop:
        try:
            heading = session.heading()
            teller.begin(heading)
            code = _measure(session, teller, stop)
        except BaseException as error:
            teller.fail(str(error) or type(error).__name__)
            raise
        # Nobody may leave before rank 0 has told all: a launcher would end it.
        session.ranks.control.barrier().wait()
        session.close()
    return code


def _measure(session: Session, teller: Teller, stop: "_Stop") -> int:
    sweep = session.sweep(lambda: stop.is_asked)
    was_stopped = False
    while True:
        try:
            event = next(sweep)
        except StopIteration as end:
            was_stopped = bool(end.value)
            break
        teller.take(event)
    loop = session.options.loop
    ending = Ending(
        totals=teller.totals,
        least_busbw_gb_per_s=session.variables.least_busbw_gb_per_s,
        memory=_memory(session),
        errors=("interrupted",) if was_stopped and loop.cycles else (),
        was_stopped=was_stopped,
    )
    teller.end(ending)
    if ending.errors:
        return Exit.INTERRUPTED
    return Exit.FAILED if ending.is_failed else Exit.OK


def _memory(session: Session) -> str:
    if not session.options.shown.has_memory:
        return ""
    bench = next(iter(session.benches.values()))
    own = format_size(2 * bench.buffers.capacity_bytes)
    if session.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(session.ranks.device)
        return f"GPU memory usage : User-Allocated {own} | Reserved {format_size(peak)}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"Host memory usage : User-Allocated {own} | Peak RSS {format_size(peak)}"


class _Stop:
    """Whether the user wants an end; the second time it ends at once."""

    is_asked = False

    def ask(self, number: int, _frame: object) -> None:
        if self.is_asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.is_asked = True


@contextmanager
def _stopping() -> Generator[_Stop]:
    stop = _Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.ask) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
