"""Time named collectives: ronde's coordinator beside bare Gloo, interleaved in one run.

Run it as ``ronde run -n 2 python benchmarks/named_tensors.py``. Every round times each
case once by ronde and once by Gloo; figures are in ms:

* one allreduce of 4 bytes, by name, waited for;
* 160 tensors of 16 KiB submitted together, then waited for (Gloo: one by one, unfused,
  as a script without Horovod would);
* ``broadcast_parameters`` of the same 160 (Gloo: one by one);
* one all-reduce of 4 bytes, 64 KiB and 1 MiB by ronde's own engine, without a name;
* one allreduce of 64 MiB, in place and into a new tensor.

``--busy 10`` has ten programs that only compute run beside, as on a machine that
others use too: in the session of rank 0, or each in its own (``--apart``), which is
what counts where the kernel shares cores out by sessions
(``/proc/sys/kernel/sched_autogroup_enabled``). ``--small`` times the calls of 4 bytes
alone. Medians and 95th percentiles are of all calls.

Horovod 0.28.1's measured figures on a machine like this one stand beside them; they
are quoted, not measured here.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import ronde.torch as hvd
from ronde.session import current_session

_MANY = 160


@dataclass(frozen=True, slots=True)
class Case:
    """The timed calls.

    Attributes:
        name: What it is.
        horovod_ms: What Horovod took for it, quoted.
        repeats: Calls in one timing.
        by_ronde: One call.
        by_gloo: The same work on bare Gloo.
    """

    name: str
    horovod_ms: str
    repeats: int
    by_ronde: Callable[[], None]
    by_gloo: Callable[[], None]


def main() -> None:
    """Time all cases and print them from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="programs that compute")
    parser.add_argument("--apart", action="store_true", help="in other sessions")
    parser.add_argument("--small", action="store_true", help="4 bytes alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            start_new_session=options.apart,
        )
        for _ in range(options.busy if hvd.rank() == 0 else 0)
    ]
    try:
        _measure(options.rounds, is_small=options.small)
    finally:
        for program in busy:
            program.kill()
            program.wait()


def _measure(rounds: int, *, is_small: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = hvd.broadcast_object(directory, 0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(path) / 'store'}",
            rank=hvd.rank(),
            world_size=hvd.size(),
        )
        cases = _cases()[: 2 if is_small else None]
        for case in cases:  # the first call of a name is negotiated in full
            case.by_ronde()
            case.by_gloo()
        times = [_time_all(cases) for _ in range(rounds)]
        if hvd.rank() == 0:
            _print(cases, times)
        dist.destroy_process_group()
        # A rank that ends its store after the file is gone tries to open it for long.
        hvd.barrier()


def _cases() -> list[Case]:
    tiny, big = torch.ones(1), torch.ones(16 << 20)
    many = [torch.ones(4096) for _ in range(_MANY)]

    def together() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=f"many.{number}")
            for number, tensor in enumerate(many)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
        for work in works:
            work.wait()

    parameters = {f"{number}": tensor for number, tensor in enumerate(many)}

    def copy_one_by_one() -> None:
        for tensor in many:
            dist.broadcast(tensor, 0)

    def gloo_new() -> None:
        dist.all_reduce(big.clone())

    engine = current_session().states[0].communicator.duplicate()
    raw = [
        Case(
            f"raw {name}",
            "",
            repeats,
            lambda tensor=tensor: _drop(engine.all_reduce(tensor).wait()),
            lambda tensor=tensor: _drop(dist.all_reduce(tensor)),
        )
        for name, repeats, tensor in (
            ("4 B", 200, torch.ones(1)),
            ("64 KiB", 50, torch.ones(16 << 10)),
            ("1 MiB", 20, torch.ones(1 << 18)),
        )
    ]
    return [
        Case(
            "4 B",
            "1.1-2.1",
            200,
            lambda: _drop(hvd.allreduce(tiny, name="tiny")),
            lambda: _drop(dist.all_reduce(tiny)),
        ),
        *raw,
        Case(f"{_MANY} x 16 KiB", "16-31", 5, together, one_by_one),
        Case(
            f"{_MANY} copied",
            "",
            5,
            lambda: hvd.broadcast_parameters(parameters, 0),
            copy_one_by_one,
        ),
        Case(
            "64 MiB in place",
            "",
            1,
            lambda: _drop(hvd.allreduce_(big, name="big")),
            lambda: _drop(dist.all_reduce(big)),
        ),
        Case(
            "64 MiB",
            "111-162",
            1,
            lambda: _drop(hvd.allreduce(big, name="new")),
            gloo_new,
        ),
    ]


def _drop(result: object) -> None:
    """Let go of a result."""
    del result


def _time_all(cases: list[Case]) -> list[tuple[list[float], list[float]]]:
    return [
        (_time(case.by_ronde, case.repeats), _time(case.by_gloo, case.repeats))
        for case in cases
    ]


def _time(call: Callable[[], None], repeats: int) -> list[float]:
    """Return the times of some calls, in ms."""
    hvd.barrier()
    taken: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1e3)
    return taken


def _print(
    cases: list[Case], times: list[list[tuple[list[float], list[float]]]]
) -> None:
    print(
        f"{hvd.size()} ranks, {len(times)} rounds, torch {torch.__version__}; "
        "ms: median and 95th percentile of all calls; ratios: Gloo's to ronde's"
    )
    print(f"{'':>16} {'ronde':>17} {'Gloo':>17} {'ratios':>11}  Horovod (quoted)")
    for index, case in enumerate(cases):
        ours = [call for one in times for call in one[index][0]]
        gloo = [call for one in times for call in one[index][1]]
        ratios = [_percentile(gloo, p) / _percentile(ours, p) for p in (50, 95)]
        print(
            f"{case.name:>16} {_show(ours):>17} {_show(gloo):>17} "
            f"{ratios[0]:>5.2f} {ratios[1]:>5.2f}  {case.horovod_ms}"
        )


def _show(values: list[float]) -> str:
    return f"{_percentile(values, 50):.3f} {_percentile(values, 95):8.3f}"


def _percentile(values: list[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


if __name__ == "__main__":
    main()
