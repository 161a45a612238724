"""``scripts/gpu``: words -> wheels, or parts that run in turn -> a folder of reports.

Needs nothing but Python and torch. Each part has a time limit and is killed with all
its processes when it runs over, and the reports are written anew after each part: what
fails, hangs or is cut off loses nothing of the rest.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.gpu_machine.machine import MachineError, make_environment, unpack
from scripts.gpu_machine.packing import MAX_MIB, PackingError, pack
from scripts.gpu_machine.parts import Part, facts_part, gpu_parts, rehearsal_parts
from scripts.gpu_machine.report import Report
from scripts.gpu_machine.running import Outcome, Result, Runner

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 535.0
"""For everything, so that who has 10 minutes on a machine gets the report back."""
LEAST_S = 15.0
"""A part is not begun with less than this left."""


def main(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    try:
        if options.pack:
            print(pack(ROOT, options.wheels))
            return 0
        return _run(options)
    except (PackingError, MachineError) as error:
        print(f"scripts/gpu: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Test and measure ronde on this machine's NVIDIA GPUs, offline.",
    )
    add = parser.add_argument
    add("--pack", action="store_true", help=f"gather wheels, at most {MAX_MIB} MiB")
    add("--rehearse", action="store_true", help="run on the CPU, with tiny sizes")
    add("--wheels", type=Path, default=ROOT / ".whl", help="default: .whl")
    add("--out", type=Path, default=ROOT / "gpu-report", help="default: gpu-report")
    add("--only", default="", help="parts whose names begin so, as: tests,train")
    add("--parts", type=Path, help=argparse.SUPPRESS)  # other parts, for tests
    return parser


def _run(options: argparse.Namespace) -> int:
    end_s = time.monotonic() + BUDGET_S
    report = Report(options.out, is_rehearsal=options.rehearse)
    with tempfile.TemporaryDirectory(prefix="ronde-gpu-") as folder:
        scratch = Path(folder)
        wheels = [] if options.rehearse else unpack(options.wheels, scratch / "wheels")
        python = make_environment(ROOT, scratch / "venv", wheels)
        runner = Runner(ROOT, python, options.out)
        for part in _parts(options, scratch, report):
            left_s = end_s - time.monotonic()
            outcome = Outcome(part.name, Result.SKIPPED, 0.0, "no time was left")
            if left_s >= LEAST_S:
                outcome = runner.run(part, min(part.limit_s, left_s))
            report.add(part, outcome)
            print(outcome, flush=True)
    print(f"reports: {report.folder}")
    return 0 if report.is_passed else 1


def _parts(
    options: argparse.Namespace, scratch: Path, report: Report
) -> Iterator[Part]:
    """Yield the parts; those after the first depend on its findings."""
    if options.parts is not None:
        yield from (Part(**each) for each in json.loads(options.parts.read_text()))
        return
    yield facts_part(scratch)
    if not report.is_passed:
        return
    gpus = report.facts["gpus"]
    if not gpus and not options.rehearse:
        raise MachineError(
            "torch must see a GPU, got none. facts.log has what the driver says. "
            "Without a GPU, type: scripts/gpu --rehearse"
        )
    parts = (
        rehearsal_parts(scratch) if options.rehearse else gpu_parts(scratch, len(gpus))
    )
    chosen = tuple(options.only.split(","))
    yield from (part for part in parts if part.name.startswith(chosen))


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C does: the part that runs is ended first.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
