"""Benchmark objects for ranks of a test, without the command line."""

import torch
from tests.limits import HANG_S

from ronde.bench import (
    COLLECTIVES,
    DTYPES,
    Buffers,
    Clock,
    Engines,
    Measured,
    Options,
    Ranks,
    RowBench,
    Shown,
    Sweep,
    SweepBench,
    TimingLoop,
    Watchdog,
)
from ronde.collectives import connect

CPU = torch.device("cpu")
LOOP = TimingLoop(iterations=2, warmup=0)


def row_bench(communicator, *, loop=LOOP, capacity_bytes=1 << 16):
    """Return a ``RowBench`` on a test's communicator."""
    control = communicator.duplicate()
    ranks = Ranks(
        control=control,
        engines={communicator.engine: communicator},
        device=CPU,
        devices=(),
        hosts=("localhost",) * communicator.size,
        num_sharing=communicator.size,
    )
    return RowBench(
        ranks=ranks,
        communicator=communicator,
        buffers=Buffers(
            lambda n: communicator.allocate(n, torch.uint8, CPU),
            capacity_bytes,
            loop.unaligned_by,
        ),
        clock=Clock(lambda: None, lambda: control.barrier().wait()),
        loop=loop,
        watchdog=Watchdog(0, print),
    )


def by_shared_memory(info):
    """Connect by an engine that is fast with more ranks than cores."""
    return connect(info, timeout_s=HANG_S, engine="shared_memory")


def options_of(test, *, dtypes=("float",), ops=("sum",), sizes=(80, 5120), loop=LOOP):
    """Return options that sweep between two sizes in steps of factor 64."""
    collective = COLLECTIVES[test]
    return Options(
        test=collective,
        sweep=Sweep(
            min_bytes=sizes[0],
            max_bytes=sizes[1],
            step_bytes=1,
            factor=64,
            dtypes=tuple(DTYPES[name] for name in dtypes),
            ops=ops if collective.has_op else (collective.redop,),
            root=-1,
        ),
        loop=loop,
        shown=Shown(),
        engines=Engines(),
    )


def sweep_bench(communicator, options, **further):
    """Return a ``SweepBench`` on a test's communicator."""
    bench = row_bench(communicator, loop=options.loop, **further)
    return SweepBench(bench, options, lambda: False)


def run_rows(bench):
    """Run a sweep; return its rows."""
    events = []
    bench.run(events.append)
    return [event for event in events if isinstance(event, Measured)]
