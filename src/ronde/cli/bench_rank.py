"""One rank of ``ronde bench``: measures with the others; rank 0 tells."""

import resource

import torch

from ronde.bench.measured import Ending, Reason
from ronde.bench.options import Exit, Options
from ronde.bench.session import BenchSession, open_session
from ronde.bench.variables import Variables
from ronde.cli.bench_contest import run_contest
from ronde.cli.bench_stop import Stop, stopping
from ronde.cli.bench_teller import Teller
from ronde.cli.bench_tune import explained, run_explaining, run_tuning
from ronde.errors import CollectiveError, UsageError
from ronde.units import format_size
from ronde.world import RankInfo


def run_rank(options: Options, variables: Variables, claim: RankInfo) -> int:
    """Take part in a benchmark; return the exit code, alike on all ranks.

    Raises:
        UsageError: Something asked for cannot be.
        CollectiveError: A collective failed.
    """
    if options.is_tuned:
        run_tuning(options, variables, claim)
    if not options.is_measured:
        if options.is_explained:
            run_explaining(options, variables, claim)
        return Exit.OK
    teller = Teller(options, is_speaking=claim.rank == 0)
    try:
        session = open_session(claim, options, variables, teller.expired)
    except CollectiveError as error:
        raise UsageError(
            f"all {claim.size} ranks that {claim.launcher} speaks of must meet: {error}"
        ) from error
    with stopping() as stop:
        try:
            code = _measure(session, teller, stop)
        except BaseException as error:
            teller.fail(str(error) or type(error).__name__)
            session.close()
            raise
        # Nobody may leave before rank 0 has told all: a launcher would end it.
        session.ranks.control.barrier().wait()
        session.close()
    return code


def _measure(session: BenchSession, teller: Teller, stop: Stop) -> int:
    """Do what was asked for."""
    options = session.options
    if options.is_explained and session.ranks.is_speaker:
        print("\n".join(f"# {line}" for line in explained(session.ranks)), flush=True)
    if options.is_compared:
        return run_contest(session, stop)
    return _sweep(session, teller, stop)


def _sweep(session: BenchSession, teller: Teller, stop: Stop) -> int:
    """Run the sweeps of one engine."""
    teller.begin(session.heading())
    sweep = session.sweep(lambda: stop.is_asked)
    reason = Reason.COMPLETE
    while True:
        try:
            event = next(sweep)
        except StopIteration as end:
            reason = Reason(end.value)
            break
        teller.take(event)
    loop = session.options.loop
    ending = Ending(
        totals=teller.totals,
        least_busbw_gb_per_s=session.variables.least_busbw_gb_per_s,
        memory=_memory(session),
        # A soak has no other end.
        errors=("interrupted",) if reason is Reason.STOPPED and loop.cycles else (),
        reason=reason,
    )
    teller.end(ending)
    if ending.errors:
        return Exit.INTERRUPTED
    return Exit.FAILED if ending.is_failed else Exit.OK


def _memory(session: BenchSession) -> str:
    if not session.options.shown.has_memory:
        return ""
    bench = next(iter(session.benches.values()))
    own = format_size(2 * bench.buffers.capacity_bytes)
    if session.ranks.device.type == "cuda":
        peak = torch.cuda.max_memory_reserved(session.ranks.device)
        return f"GPU memory usage : User-Allocated {own} | Reserved {format_size(peak)}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"Host memory usage : User-Allocated {own} | Peak RSS {format_size(peak)}"
