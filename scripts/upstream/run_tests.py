"""Runs Horovod's own tests and examples through ronde's ``horovod``."""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.launch.environments import own_environment
from ronde.world.environment import read_cache_directory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ALIAS = ROOT / "src" / "ronde" / "horovod" / "alias"
PINNED = "2626dc87"

# pytest 8 no longer collects them as they are.
PACKAGES = (
    *("pytest<8", "mock", "psutil", "cloudpickle", "parameterized", "packaging"),
    *("pyyaml", "pytest-forked", "pytest-timeout"),
)
PARALLEL = ("test_torch.py", "test_common.py", "test_timeline.py")
PARALLEL += ("test_adasum_pytorch.py",)
SINGLE = ("test_torch_elastic.py", "test_elastic_run.py")
EXAMPLES = {
    "pytorch/pytorch_synthetic_benchmark.py": (
        *("--no-cuda", "--batch-size", "2", "--num-warmup-batches", "1"),
        *("--num-batches-per-iter", "1", "--num-iters", "2"),
    ),
    "adasum/adasum_small_model.py": ("--op", "Average"),
    "adasum/adasum_small_model.py --op Adasum": ("--op", "Adasum"),
}
# With exactly 3 ranks they want sums in fp16 to equal what fp32 gives, bit for bit:
# 3 * 14.367, say, to be 43.1016, which is no number of fp16. Horovod fails them, too.
IMPOSSIBLE_AT_3 = (
    "test_horovod_allreduce_prescale",
    "test_horovod_reducescatter_prescale",
    "test_horovod_grouped_reducescatter_prescale",
)
NO_TESTS = 5


@dataclass(frozen=True)
class Launch:
    """How ranks are started.

    Attributes:
        python: With pytest and what the tests need.
        ranks: How many.
        is_mpi: By ``mpirun`` and not by ``ronde run``.
    """

    python: Path
    ranks: int
    is_mpi: bool

    def command(self) -> list[str]:
        """Return what stands before Python's own arguments."""
        if not self.is_mpi:
            ronde = [str(self.python), "-m", "ronde", "run", "-np", str(self.ranks)]
            return [*ronde, "--", str(self.python)]
        mpirun = Path(sys.executable).parent / "mpirun"
        options = ["--allow-run-as-root", "--oversubscribe", "-n", str(self.ranks)]
        return [str(mpirun), *options, str(self.python)]


def main() -> int:
    """Run what is asked for; return 0 when nothing failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_options()
    upstream = options.checkout
    if not (upstream / "test" / "parallel" / "test_torch.py").is_file():
        print(
            f"upstream_tests: PATH must be a checkout of Horovod, got {upstream}. "
            "Type: git clone https://github.com/horovod/horovod && "
            f"git -C horovod checkout {PINNED}",
            file=sys.stderr,
        )
        return 64
    launch = Launch(environment(), options.ranks, options.mpi)
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as name:
        scratch = Path(name)
        lay_out(upstream, scratch)
        if options.examples:
            results = [run_example(launch, scratch, example) for example in EXAMPLES]
        else:
            results = list(run_files(launch, scratch, options))
    return 0 if all(results) else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="upstream_tests")
    add = parser.add_argument
    add("checkout", type=Path, help=f"Horovod's source, at {PINNED}")
    add("--ranks", type=int, default=2, help="for the parallel tests (default: 2)")
    add("--mpi", action="store_true", help="start them with mpirun")
    add("--examples", action="store_true", help="run examples, and no tests")
    add(
        "--file",
        action="append",
        default=[],
        choices=[*PARALLEL, *SINGLE],
        help="only this file; may be repeated",
    )
    add("-k", dest="words", default="", help="only tests that match, as pytest has it")
    add("--timeout", type=int, default=120, help="seconds a test may take")
    add("--verbose", action="store_true", help="show what the tests print")
    return parser.parse_args()


def environment() -> Path:
    """Return a Python that has what the tests need beside all that ours has.

    It is made once, below the user's cache, and again when the packages change.
    """
    home = read_cache_directory() / "upstream-tests"
    python, stamp = home / "bin" / "python", home / "packages"
    wanted = "\n".join((sys.executable, *PACKAGES))
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"upstream_tests: making {home}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        install = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(install, check=True)
        [ours] = [p for p in sys.path if p.startswith(sys.prefix) and "site-" in p]
        [theirs] = home.glob("lib/python*/site-packages")
        (theirs / "ronde.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        stamp.write_text(wanted)
    return python


def lay_out(upstream: Path, scratch: Path) -> None:
    """Copy the tests and examples, with what lies above them, to a directory."""
    shutil.copytree(upstream / "test", scratch / "test")
    shutil.copytree(upstream / "examples", scratch / "examples")
    shutil.copy(upstream / "setup.cfg", scratch)
    shutil.copy(HERE / "conftest.py", scratch)


def run_files(
    launch: Launch, scratch: Path, options: argparse.Namespace
) -> Iterator[bool]:
    """Run each file of tests; yield whether all of it passed."""
    files = [(f"parallel/{name}", launch.command()) for name in PARALLEL]
    if not launch.is_mpi:
        files += [(f"single/{name}", [str(launch.python)]) for name in SINGLE]
    for test in left_out(launch):
        print(f"left out, for nobody can pass it at {launch.ranks} ranks: {test}")
    print(f"{'file':36} rank passed failed skipped")
    for name, command in files:
        if options.file and Path(name).name not in options.file:
            continue
        words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", f"test/{name}"]
        words += ["--timeout", str(options.timeout)]
        words += [f"--deselect=test/{name}::{test}" for test in left_out(launch)]
        words += ["-k", options.words] if options.words else []
        outcomes = scratch / "outcomes" / name
        outcomes.mkdir(parents=True)
        log = read_cache_directory() / "upstream-tests" / f"{Path(name).stem}.log"
        code = run([*command, *words], scratch, outcomes, log)
        is_good = code in (0, NO_TESTS)
        if options.verbose:
            print(log.read_text())
        has_all = count(name, outcomes, launch.ranks if "parallel" in name else 1)
        if not is_good:
            print(f"{'':36} exit code {code}; all they said: {log}")
        yield is_good and (has_all or bool(options.words))


def left_out(launch: Launch) -> list[str]:
    """Return the tests that nobody can pass with so many ranks."""
    names = IMPOSSIBLE_AT_3 if launch.ranks == 3 else ()
    return [f"TorchTests::{name}" for name in names]


def run(command: Sequence[str], scratch: Path, outcomes: Path, log: Path) -> int:
    """Run a command in ``scratch``, where ``horovod`` is ronde's; return its code."""
    env = own_environment()
    path = [str(ALIAS), env.get("PYTHONPATH", "")]
    if importlib.util.find_spec("torchvision") is None:
        path.append(str(HERE / "stand_ins"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env["UPSTREAM_TESTS_OUTCOMES"] = str(outcomes)
    env.setdefault("OMP_NUM_THREADS", "1")
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            cwd=scratch,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            return process.wait()
        finally:
            process.terminate()


def count(name: str, outcomes: Path, ranks: int) -> bool:
    """Print what came of a file on each rank; say whether every rank told."""
    for rank in range(ranks):
        file = outcomes / str(rank)
        lines = file.read_text().splitlines() if file.exists() else []
        tests = [json.loads(line) for line in lines]
        sums = Counter(test["outcome"] for test in tests)
        columns = (sums["passed"], sums["failed"], sums["skipped"])
        print(f"{name:36} {rank:4} {columns[0]:6} {columns[1]:6} {columns[2]:7}")
        for test in tests:
            if test["outcome"] == "failed":
                print(f"{'':36} failed: {test['test']}")
    return all((outcomes / str(rank)).exists() for rank in range(ranks))


def run_example(launch: Launch, scratch: Path, example: str) -> bool:
    """Run one of the examples, and say how it ended."""
    script = f"examples/{example.split(maxsplit=1)[0]}"
    command = [*launch.command(), script, *EXAMPLES[example]]
    log = scratch / "log"
    code = run(command, scratch, scratch, log)
    print(f"{example}: exit code {code}\n{log.read_text()}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
