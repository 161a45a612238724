"""Runs Horovod's own tests and examples through ronde's ``horovod``."""

import argparse
import json
import os
import shutil
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
    add("--file", action="append", default=[], help="only this file; may be repeated")
    add("-k", dest="words", default="", help="only tests that match, as pytest has it")
    add("--timeout", type=int, default=120, help="seconds a test may take")
    add("--deselect", action="append", default=[], help="leave a test out")
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
    print(f"{'file':36} rank passed failed skipped")
    for name, command in files:
        if options.file and Path(name).name not in options.file:
            continue
        words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", f"test/{name}"]
        words += ["--timeout", str(options.timeout)]
        words += [f"--deselect={test}" for test in options.deselect]
        words += ["-k", options.words] if options.words else []
        outcomes = scratch / "outcomes" / name
        outcomes.mkdir(parents=True)
        done = run([*command, *words], scratch, outcomes)
        is_good = done.returncode in (0, NO_TESTS)
        log = read_cache_directory() / "upstream-tests" / f"{Path(name).stem}.log"
        log.write_text(done.stdout)
        if options.verbose:
            print(done.stdout)
        has_all = count(name, outcomes, launch.ranks if "parallel" in name else 1)
        if not is_good:
            print(f"{'':36} exit code {done.returncode}; all they said: {log}")
        yield is_good and (has_all or bool(options.words))


def run(
    command: Sequence[str], scratch: Path, outcomes: Path, *further_path: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a command in ``scratch``, where ``horovod`` is ronde's."""
    env = own_environment()
    path = [str(ALIAS), *map(str, further_path), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env["UPSTREAM_TESTS_OUTCOMES"] = str(outcomes)
    env.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        command,
        cwd=scratch,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


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
    has_torchvision = subprocess.run(
        [launch.python, "-c", "import torchvision"], capture_output=True, check=False
    )
    stand_ins = [HERE / "stand_ins"] if has_torchvision.returncode else []
    script = f"examples/{example.split(maxsplit=1)[0]}"
    command = [*launch.command(), script, *EXAMPLES[example]]
    done = run(command, scratch, scratch, *stand_ins)
    print(f"{example}: exit code {done.returncode}\n{done.stdout}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
