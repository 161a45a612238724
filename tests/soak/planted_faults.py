"""Plant faults in the product, one at a time, and count those that tests find.

Run it as ``python -m tests.soak.planted_faults``: it takes as long as twenty runs of
the tests. Each fault of ``planted_faults_list.py`` goes into a clone of this
repository's HEAD, so commit first. Its ``.venv`` has the clone's ronde and the packages
of this one's. There ``scripts/test`` runs until a first test fails. That test must fail
again with the fault and pass without it: else it failed by chance, and finds nothing.
"""

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.soak.planted_faults_list import FAULTS, Fault

from ronde.processes import adopting_orphans, is_alive, read_processes, sweep

ROOT = Path(__file__).resolve().parents[2]
FAILED = re.compile(
    r"(?:FAILED|ERROR)(?: collecting)? (tests/\S+?(?:\[.*\])?)(?: - .*| _+)?\s*$"
    r"|(tests/\S+::\S.*?) (?:FAILED|ERROR)\b",
    re.MULTILINE,
)
"""A line of ``pytest -v``, by itself or with workers."""
MADE_ANEW = re.compile(r"bin|lib|python3\.\d+|site-packages")
TIDY_S = 60.0  # that an interrupted run has to remove what it made
POLL_S = 0.5


class SuiteRun(NamedTuple):
    """The outcome of a run of the tests."""

    failed: str  # the first test that failed; empty for none
    exit_code: int | None  # None where the run was ended for that test
    took_s: float


def main() -> int:
    """Plant the faults that were asked for; return 0 if enough of them were found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the faults, and end")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="these alone")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="these tests alone"
    )
    parser.add_argument(
        "--control", action="store_true", help="first see the tests pass without faults"
    )
    parser.add_argument("--at-least", type=int, help="that must be found, usually 18")
    options = parser.parse_args()
    numbers: Sequence[int] = options.only or range(1, len(FAULTS) + 1)
    if not {*numbers} <= {*range(1, len(FAULTS) + 1)}:
        parser.error(f"--only must be in 1..{len(FAULTS)}, got {options.only}")
    for number in numbers:
        fault = FAULTS[number - 1]
        planted(number, read_committed(fault))
        if options.list:
            print(f"{number:2} src/ronde/{fault.file}: {fault.harm}")
    if options.list:
        return 0
    least = len(numbers) - 2 * (not options.only)
    least = least if options.at_least is None else options.at_least
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidy up then, too
    with adopting_orphans():
        if options.control:
            with cloned() as checkout:
                control = run_tests(checkout, options.tests)
            if control.failed or control.exit_code:
                sys.exit(f"without a fault: {control.failed or control.exit_code}")
            print(f"without a fault all pass, in {control.took_s:.0f} s", flush=True)
        found = [try_fault(number, options.tests) for number in numbers]
    print(f"found {sum(found)} of {len(numbers)}")
    return 0 if sum(found) >= least else 1


def try_fault(number: int, tests: Sequence[str]) -> bool:
    """Print the row of a fault; return True if a test finds it."""
    fault = FAULTS[number - 1]
    with cloned() as checkout:
        file = checkout / "src" / "ronde" / fault.file
        right = file.read_text()
        file.write_text(planted(number, right))
        run = run_tests(checkout, tests)
        text = run.failed or f"{fault.harm} (exit code {run.exit_code})"
        is_found = bool(run.failed)
        if is_found:
            again = run_tests(checkout, [run.failed])
            file.write_text(right)
            without = run_tests(checkout, [run.failed])
            is_found = bool(again.failed) and not without.failed
            text += "" if is_found else " failed by chance"
    word = "found" if is_found else "MISSED"
    print(
        f"{number:2} {fault.file:32} {word:6} {run.took_s:5.0f} s  {text}", flush=True
    )
    return is_found


def planted(number: int, text: str) -> str:
    """Return a file's text with a fault in it."""
    fault = FAULTS[number - 1]
    if (count := text.count(fault.old)) != 1:
        sys.exit(
            f"fault {number}: src/ronde/{fault.file} must have its text once, got "
            f"{count} times. Mend planted_faults_list.py:\n{fault.old}"
        )
    return text.replace(fault.old, fault.new)


def read_committed(fault: Fault) -> str:
    words = ["git", "-C", str(ROOT), "show", f"HEAD:src/ronde/{fault.file}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout  # nothing where there is no such file


@contextmanager
def cloned() -> Generator[Path]:
    """Clone HEAD, with an environment of its own, for as long as this is open."""
    # Not below /tmp, which hosts of some tests do not see.
    with tempfile.TemporaryDirectory(prefix="ronde-fault-", dir="/var/tmp") as folder:
        checkout = Path(folder).resolve() / "checkout"
        words = ["git", "clone", "--quiet", str(ROOT), str(checkout)]
        subprocess.run(words, check=True)
        mirror(ROOT / ".venv", checkout / ".venv", checkout)
        # What is installed counts as it is: scripts/test is to install nothing, least
        # of all through the links.
        pins = (checkout / name for name in ("pyproject.toml", "constraints.txt"))
        digest = hashlib.sha256(b"".join(each.read_bytes() for each in pins))
        stamp = checkout / ".venv/installed"
        stamp.unlink(missing_ok=True)
        stamp.write_text(f"{digest.hexdigest()}  -\ndev\n")
        pip = checkout / ".venv/bin/pip"
        pip.unlink()
        pip.symlink_to("/bin/false")
        show = "import ronde; print(ronde.__file__)"
        words = [str(checkout / ".venv/bin/python"), "-c", show]
        file = subprocess.run(words, check=True, env=environment(), capture_output=True)
        if not Path(file.stdout.decode().strip()).is_relative_to(checkout / "src"):
            sys.exit(f"ronde must be the clone's, {checkout}, got {file.stdout!r}")
        yield checkout


def mirror(source: Path, target: Path, checkout: Path) -> None:
    """Link a folder's files; replace this checkout's path by ``checkout`` in them."""
    target.mkdir()
    for entry in source.iterdir():
        new = target / entry.name
        if entry.is_symlink():
            new.symlink_to(entry.readlink())
        elif entry.is_dir() and MADE_ANEW.fullmatch(entry.name):
            mirror(entry, new, checkout)
        elif entry.is_file() and str(ROOT).encode() in (data := entry.read_bytes()):
            new.write_bytes(data.replace(bytes(ROOT), bytes(checkout)))
            new.chmod(entry.stat().st_mode)
        else:
            new.symlink_to(entry)


def environment() -> dict[str, str]:
    env = os.environ | {"PYTEST_ADDOPTS": "-x -v"}  # noqa: TID251  a child's
    unwanted = ("PYTHONPATH", "JUNIT_DIR")
    return {name: value for name, value in env.items() if name not in unwanted}


def run_tests(checkout: Path, tests: Sequence[str]) -> SuiteRun:
    """Run all tests, or some, until one fails; leave no process behind."""
    log, begun_s = checkout.with_name("log"), time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(checkout / "scripts/test"), *(tests or ["-x"])],
            cwd=checkout,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        found = exit_code = None
        while found is None and exit_code is None:
            time.sleep(POLL_S)
            exit_code = process.poll()
            found = FAILED.search(log.read_text(errors="replace"))
        took_s = time.monotonic() - begun_s
    finally:
        end(process, is_script=not tests)
    return SuiteRun((found[1] or found[2]) if found else "", exit_code, took_s)


def end(process: "subprocess.Popen[bytes]", *, is_script: bool) -> None:
    """Interrupt pytest, which removes its files; kill remaining processes."""
    interrupted = [process.pid]
    if is_script:  # which is to go on with nothing else meanwhile
        process.send_signal(signal.SIGSTOP)
        all_processes = read_processes().values()
        interrupted = [p.pid for p in all_processes if p.parent == process.pid]
    if process.poll() is None:
        for pid in interrupted:
            os.kill(pid, signal.SIGINT)
    due_s = time.monotonic() + TIDY_S
    while time.monotonic() < due_s and any(map(is_alive, interrupted)):
        time.sleep(POLL_S)
    if stuck := sweep().stuck:
        print(f"left behind: {', '.join(stuck)}")


if __name__ == "__main__":
    sys.exit(main())
