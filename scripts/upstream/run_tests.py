"""Runs Horovod's own tests, or pytorch/ignite's, on ronde's ``horovod``.

Or PyTorch's, of torch.distributed: each on Gloo, and on ronde in Gloo's place.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.environments import own_environment

HERE = Path(__file__).parent
_CACHE = (
    Path(own_environment().get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ronde"
)
PACKAGES = HERE / "packages.txt"
USAGE = 64
NO_TESTS = 5

PARALLEL = ("test_torch.py", "test_common.py", "test_timeline.py")
PARALLEL += ("test_adasum_pytorch.py",)
SINGLE = ("test_torch_elastic.py", "test_elastic_run.py")
TENSORFLOW = (
    *("test_tensorflow.py", "test_tensorflow_process_sets.py"),
    *("test_tensorflow_process_sets_dynamic.py", "test_tensorflow2_keras.py"),
    "test_tensorflow2_keras_process_sets.py",
)
# Keras 2 on a current TensorFlow. Tests run several operations in one session, each of
# which holds a thread.
TENSORFLOW_VARIABLES = {
    "TF_USE_LEGACY_KERAS": "1",
    "TF_NUM_INTEROP_THREADS": "64",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Not test_elastic_driver.py and test_elastic_discovery.py, of Horovod's own driver.
ELASTIC = (
    *("single/test_torch_elastic.py", "single/test_elastic_run.py"),
    "integration/test_elastic_torch.py",
)
# Not test_elastic_tensorflow_keras.py: its program needs TensorFlow 1 (tf.ConfigProto).
TENSORFLOW_ELASTIC = ("integration/test_elastic_tensorflow2.py",)
# Of those in integration, and why: Horovod fails them, too.
ELASTIC_LEFT_OUT = {
    "test_min_hosts_timeout": "it calls a function of the tests with a wrong argument",
    "test_resurrecting_blacklisted_hosts_exponential_backoff": "it counts on speed",
}
EXAMPLES = {
    "pytorch/pytorch_synthetic_benchmark.py": (
        *("--no-cuda", "--batch-size", "2", "--num-warmup-batches", "1"),
        *("--num-batches-per-iter", "1", "--num-iters", "2"),
    ),
    "adasum/adasum_small_model.py": ("--op", "Average"),
    "adasum/adasum_small_model.py --op Adasum": ("--op", "Adasum"),
}
_TENSORFLOW_BENCHMARK = (
    *("--no-cuda", "--model", "MobileNetV2", "--batch-size", "2"),
    *("--num-batches-per-iter", "1", "--num-iters", "2"),
)
TENSORFLOW_EXAMPLES = {
    f"tensorflow2/tensorflow2_{name}.py": arguments
    for name, arguments in (
        ("synthetic_benchmark", _TENSORFLOW_BENCHMARK),
        ("keras_synthetic_benchmark", _TENSORFLOW_BENCHMARK),
        ("mnist", ()),
        ("keras_mnist", ()),
    )
}
TENSORFLOW_ELASTIC_EXAMPLES = {
    f"elastic/{name.removesuffix('.py')}_elastic.py": arguments
    for name, arguments in TENSORFLOW_EXAMPLES.items()
    if "keras_synthetic" not in name
}
ELASTIC_EXAMPLES = {
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": (
        EXAMPLES["pytorch/pytorch_synthetic_benchmark.py"]
    ),
    "elastic/pytorch/pytorch_mnist_elastic.py": ("--no-cuda", "--epochs", "2"),
    "elastic/pytorch/pytorch_imagenet_resnet50_elastic.py": (
        *("--no-cuda", "--epochs", "1", "--batch-size", "2"),
        *("--val-batch-size", "2", "--batches-per-commit", "1"),
    ),
}
# With exactly 3 ranks they want sums in fp16 to equal what fp32 gives, bit for bit:
# 3 * 14.367, say, to be 43.1016, which is no number of fp16. Horovod fails them, too.
IMPOSSIBLE_AT_3 = (
    "test_horovod_allreduce_prescale",
    "test_horovod_reducescatter_prescale",
    "test_horovod_grouped_reducescatter_prescale",
)
# NumPy 2 compares an fp16 error of 0 with 1e-8 in fp16, where that is 0, too.
IMPOSSIBLE_WITH_NUMPY = {
    "test_horovod_reducescatter_grad_cpu_process_sets": "it wants 0 to be less than an "
    "fp16 that is 0"
}
CLASSES = ("TorchTests", "ElasticTorchTests", "TensorFlowTests")
CLASSES += ("TensorFlowProcessSetsTests", "ElasticTensorFlow2Tests")

# Of ignite's tests, those that run on Horovod; most start 4 ranks by horovod.run.
IGNITE_WORDS = "hvd or horovod"
IGNITE_RANKS = 4
# They do not run without a large package or the network. The first two have 3 tests
# on Horovod, the last one has one.
NEEDS_MORE = {
    "metrics/gan/test_fid.py": "pytorch-fid",
    "metrics/vision/test_object_detection_map.py": "pycocotools",
    "metrics/gan/test_utils.py": "torchvision",
    "metrics/fairness": "fairlearn",
    "metrics/rec_sys/test_ndcg.py": "ranx",
    "handlers/test_clearml_logger.py": "clearml",
    "metrics/nlp/test_rouge.py": "nltk's data, from the network",
}


# Of PyTorch's tests. The first comes with torch itself; ``tensor`` was ``_tensor``.
TORCH_TESTS = (
    *("distributed_test.py", "test_c10d_object_collectives.py"),
    *("test_c10d_functional_native.py", "test_functional_api.py"),
    *("test_device_mesh.py", "tensor/test_redistribute.py", "tensor/test_dtensor.py"),
    *("tensor/test_math_ops.py", "tensor/parallel/test_tp_style.py"),
    *("tensor/parallel/test_tp_examples.py", "tensor/parallel/test_parallelize_api.py"),
    *("pipelining/test_schedule.py", "pipelining/test_schedule_multiproc.py"),
    *("pipelining/test_stage.py", "checkpoint", "_composable/test_replicate.py"),
    "optim/test_zero_redundancy_optimizer.py",
)


@dataclass(frozen=True)
class Project:
    """The project of the tests.

    Attributes:
        name: On GitHub.
        commit: The one that the published counts are of.
        mark: A file that only its checkout has.
        copied: What the tests need of the checkout.
    """

    name: str
    commit: str
    mark: str
    copied: tuple[str, ...]


HOROVOD = Project(
    *("horovod/horovod", "2626dc87", "test/parallel/test_torch.py"),
    ("test", "examples", "setup.cfg"),
)
IGNITE = Project(
    *("pytorch/ignite", "de08e799", "tests/ignite/conftest.py"),
    ("ignite", "tests", "pyproject.toml"),
)
TORCH = Project(
    *("pytorch/pytorch", "cf30153c", "test/distributed/test_c10d_common.py"),
    ("test/distributed",),
)
PROJECTS = (HOROVOD, IGNITE, TORCH)


@dataclass(frozen=True)
class Run:
    """One call of this script.

    Attributes:
        python: With pytest and what the tests need.
        scratch: Where the copy of the checkout is.
        options: The command line.
    """

    python: Path
    scratch: Path
    options: argparse.Namespace


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_options()
    try:
        project = find_project(options)
    except UsageError as error:
        print(f"upstream_tests: {error}", file=sys.stderr)
        return USAGE
    python = environment("-tensorflow" if options.tensorflow else "")
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as name:
        run = Run(python, Path(name), options)
        for entry in project.copied:
            source = options.checkout / entry
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, run.scratch / entry)
        shutil.copy(HERE / "conftest.py", run.scratch)
        if project is IGNITE:
            results = [run_ignite(run)]
        elif project is TORCH:
            results = list(run_torch(run))
        elif options.examples:
            examples = ELASTIC_EXAMPLES if options.elastic else EXAMPLES
            if options.tensorflow:
                examples = TENSORFLOW_EXAMPLES
            if options.tensorflow and options.elastic:
                examples = TENSORFLOW_ELASTIC_EXAMPLES
            chosen = {
                name: examples[name] for name in examples if options.words in name
            }
            results = [run_example(run, *example) for example in chosen.items()]
        else:
            results = list(run_horovod(run))
    return 0 if results and all(results) else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="upstream_tests")
    add = parser.add_argument
    wanted = " or of ".join(f"{p.name} at {p.commit}" for p in PROJECTS)
    add("checkout", type=Path, help=f"the source of {wanted}")
    add(
        *("--ranks",),
        type=int,
        default=2,
        help="of Horovod's parallel tests and PyTorch's first file (default: 2)",
    )
    add("--mpi", action="store_true", help="start these ranks with mpirun")
    add("--elastic", action="store_true", help="run Horovod's tests of elastic jobs")
    add("--tensorflow", action="store_true", help="run Horovod's tests of TensorFlow")
    add("--examples", action="store_true", help="run Horovod's examples, and no tests")
    add(
        "--file",
        action="append",
        default=[],
        help="only this one, as test_torch.py, or of ignite distributed/utils; may be "
        "repeated",
    )
    add(
        *("-k",),
        dest="words",
        default="",
        help="only tests that match, as pytest has it, or examples whose name has this",
    )
    add("--timeout", type=int, default=300, help="seconds a test may take")
    add("--verbose", action="store_true", help="show what the tests print")
    return parser.parse_args()


def find_project(options: argparse.Namespace) -> Project:
    """Return the project that the checkout is of.

    Raises:
        UsageError: It is of neither, or the options are not for that project's tests.
    """
    checkout: Path = options.checkout
    project = next((p for p in PROJECTS if (checkout / p.mark).is_file()), None)
    if project is None:
        ways = " or ".join(
            f"git clone https://github.com/{p.name} && "
            f"git -C {Path(p.name).name} checkout {p.commit}"
            for p in PROJECTS
        )
        raise UsageError(
            f"PATH must be a checkout of Horovod, ignite or PyTorch, got {checkout}. "
            f"Type: {ways}"
        )
    is_changed = options.mpi or options.examples or options.elastic
    is_changed |= options.tensorflow
    is_changed |= project is IGNITE and options.ranks != 2
    if project is not HOROVOD and is_changed:
        raise UsageError(
            "--ranks, --mpi, --elastic, --tensorflow and --examples are for Horovod's "
            f"tests, and --ranks for PyTorch's, got a checkout of {project.name}. Its "
            "tests start their ranks themselves. Leave them out."
        )
    known = [Path(name).name for name in ELASTIC]
    if not options.elastic:
        known = [*PARALLEL, *SINGLE]
    if options.tensorflow:
        files = TENSORFLOW_ELASTIC if options.elastic else TENSORFLOW
        known = [Path(name).name for name in files]
    if project is TORCH:
        known = [*TORCH_TESTS]
    for file in options.file:
        is_known = file in known
        if project is IGNITE:
            is_known = (checkout / "tests" / "ignite" / file).exists()
        if not is_known:
            rule = f"one of {', '.join(known)}"
            if project is IGNITE:
                rule = f"a path below {checkout / 'tests' / 'ignite'}"
            raise UsageError(f"--file must be {rule}, got {file}.")
    return project


def environment(suffix: str) -> Path:
    """Return a Python with our packages and those of the tests.

    It is made once, below the user's cache, and again when the packages change.
    """
    home = _CACHE / f"upstream-tests{suffix}"
    python, stamp = home / "bin" / "python", home / "made-of"
    [ours] = [p for p in sys.path if p.startswith(sys.prefix) and "site-" in p]
    paths = f"import site; site.addsitedir({ours!r})\n"
    wanted = f"{sys.executable}\n{paths}{PACKAGES.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"upstream_tests: making {home}", file=sys.stderr)
        venv = [sys.executable, "-m", "venv", "--clear", "--without-pip", home]
        subprocess.run(venv, check=True)
        [theirs] = home.glob("lib/python*/site-packages")
        (theirs / "ronde.pth").write_text(paths)
        install = [sys.executable, "-m", "pip", "--python", python, "install"]
        subprocess.run(
            [*install, "--quiet", "--no-compile", "-r", PACKAGES], check=True
        )
        # Some tests set a PYTHONPATH of their own, or start horovodrun.
        alias = [python, "-m", "ronde", "alias", "--install"]
        subprocess.run(alias, stdout=sys.stderr, check=True)
        stamp.write_text(wanted)
    return python


def launcher(run: Run) -> list[str]:
    """Return the command that starts ranks, up to Python's arguments."""
    python, ranks = str(run.python), str(run.options.ranks)
    if run.options.elastic:
        limits = ["-np", ranks, "--min-np", "1", "--max-np", ranks]
        hosts = f"localhost:{ranks}"
        return [python, "-m", "ronde", "horovodrun", *limits, "-H", hosts, "--", python]
    if not run.options.mpi:
        return [python, "-m", "ronde", "run", "-np", ranks, "--", python]
    mpirun = str(Path(sys.executable).parent / "mpirun")
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", ranks, python]


def run_horovod(run: Run) -> Iterator[bool]:
    """Run each file of Horovod's tests; yield True if all of it passed."""
    options = run.options
    names = TENSORFLOW if options.tensorflow else PARALLEL
    files = [(f"parallel/{name}", launcher(run), options.ranks) for name in names]
    if not (options.mpi or options.tensorflow):
        files += [(f"single/{name}", [str(run.python)], 1) for name in SINGLE]
    impossible = IMPOSSIBLE_AT_3
    if options.tensorflow:
        impossible = [f"{n.removesuffix('_prescale')}_cpu_prescale" for n in impossible]
    left_out = dict.fromkeys(impossible, "it cannot pass at 3 ranks")
    left_out = left_out if options.ranks == 3 else {}
    left_out |= IMPOSSIBLE_WITH_NUMPY if options.tensorflow else {}
    if options.elastic:
        names = TENSORFLOW_ELASTIC if options.tensorflow else ELASTIC
        files = [(name, [str(run.python)], 1) for name in names]
        left_out = ELASTIC_LEFT_OUT
    for test, reason in left_out.items():
        print(f"left out, for {reason}: {test}")
    print_columns()
    for name, command, ranks in files:
        if options.file and Path(name).name not in options.file:
            continue
        words = [f"test/{name}"]
        words += [
            f"--deselect=test/{name}::{of}::{test}"
            for of in CLASSES
            for test in left_out
        ]
        words += ["-k", options.words] if options.words else []
        yield run_pytest(run, name, command, words, ranks)


def run_ignite(run: Run) -> bool:
    """Run the tests of ignite that use Horovod; return True if all passed."""
    options = run.options
    words = [f"tests/ignite/{name}" for name in options.file] or ["tests/ignite"]
    for name, package in NEEDS_MORE.items():
        words.append(f"--ignore=tests/ignite/{name}")
        print(f"left out, for it needs {package}: {name}")
    words += ["-m", "distributed", "-k", IGNITE_WORDS]
    if options.words:
        words[-1] = f"({IGNITE_WORDS}) and ({options.words})"
    print_columns()
    return run_pytest(run, "ignite", [str(run.python)], words, 1)


def run_torch(run: Run) -> Iterator[bool]:
    """Run each file on Gloo and on ronde; yield True if ronde passes the same."""
    options, tests = run.options, Path("test", "distributed")
    shutil.copy(HERE / "distributed_test.py", run.scratch / tests)
    if not (run.scratch / tests / "tensor" / "test_dtensor.py").exists():
        former = run.scratch / tests / "_tensor"
        shutil.copytree(former, run.scratch / tests / "tensor", dirs_exist_ok=True)
    print(f"{'tests':42} on     passed failed skipped", flush=True)
    for name in options.file or TORCH_TESTS:
        gloo, ronde = (
            run_torch_file(run, name, engine) for engine in ("gloo", "ronde")
        )
        lost = sorted(passed(gloo) - passed(ronde))
        for test in lost:
            print(f"{'':42} passes on Gloo alone: {test}", flush=True)
        named = run_torch_file(run, name, "name") if name == TORCH_TESTS[0] else {}
        yield bool(passed(gloo)) and not lost and "failed" not in named.values()


def run_torch_file(run: Run, name: str, engine: str) -> dict[str, str]:
    """Run a file on Gloo, on ronde in its place, or on ronde by its name."""
    options, outcomes = run.options, run.scratch / "outcomes" / engine / name
    outcomes.mkdir(parents=True)
    log = outcomes / "log"
    words = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout"]
    words += [str(options.timeout), str(Path("test", "distributed", name))]
    words += ["-k", options.words] if options.words else []
    more = {
        "BACKEND": "ronde" if engine == "name" else "gloo",
        "WORLD_SIZE": str(options.ranks),
        "TEMP_DIR": str(outcomes),
        "UPSTREAM_TESTS_TORCH": "1",
        "RONDE_REPLACE_GLOO": str(int(engine == "ronde")),
    }
    execute(run, [str(run.python), *words], outcomes, log, more)
    if options.verbose:
        print(log.read_text())
    ended = read_outcomes(outcomes / "0")
    counts = Counter(ended.values())
    columns = (counts["passed"], counts["failed"], counts["skipped"])
    print(
        f"{name:42} {engine:6} {columns[0]:6} {columns[1]:6} {columns[2]:7}", flush=True
    )
    return ended


def passed(outcomes: Mapping[str, str]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome == "passed"}


def read_outcomes(file: Path) -> dict[str, str]:
    """Return the outcome of each test that is over; a later line counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    tests = [json.loads(line) for line in lines]
    return {test["test"]: test["outcome"] for test in tests}


def print_columns() -> None:
    print(f"{'tests':36} rank passed failed skipped", flush=True)


def run_pytest(
    run: Run, name: str, command: Sequence[str], words: Sequence[str], ranks: int
) -> bool:
    """Run pytest on each rank and print the outcomes; return True if all passed."""
    outcomes = run.scratch / "outcomes" / name
    outcomes.mkdir(parents=True)
    log = run.python.parents[1] / f"{Path(name).stem}.log"
    options = ["-m", "pytest", "-v", "-p", "no:cacheprovider"]
    options += ["--timeout", str(run.options.timeout)]
    code = execute(run, [*command, *options, *words], outcomes, log)
    if run.options.verbose:
        print(log.read_text())
    has_all = print_outcomes(name, outcomes, ranks)
    is_good = code in (0, NO_TESTS)
    if not is_good:
        print(f"{'':36} exit code {code}; all output is in {log}")
    return is_good and (has_all or bool(run.options.words))


def execute(
    run: Run,
    command: Sequence[str],
    outcomes: Path,
    log: Path,
    more: Mapping[str, str] | None = None,
) -> int:
    """Run a command beside the tests; return its exit code."""
    env = {**own_environment(), **(more or {})}
    env["PATH"] = f"{run.python.parent}{os.pathsep}{env['PATH']}"
    if run.options.examples:
        # In front of a real torchvision, which would download data.
        path = (str(HERE / "stand_ins"), env.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if run.options.tensorflow:
        env = {**TENSORFLOW_VARIABLES, **env}
    env["UPSTREAM_TESTS_OUTCOMES"] = str(outcomes)
    env.setdefault("OMP_NUM_THREADS", "1")
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            cwd=run.scratch,
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


def print_outcomes(name: str, outcomes: Path, ranks: int) -> bool:
    """Print the counts of each rank; return True if every rank has left some."""
    for rank in range(ranks):
        tests = read_outcomes(outcomes / str(rank))
        sums = Counter(tests.values())
        columns = (sums["passed"], sums["failed"], sums["skipped"])
        print(f"{name:36} {rank:4} {columns[0]:6} {columns[1]:6} {columns[2]:7}")
        for test, outcome in tests.items():
            if outcome == "failed":
                print(f"{'':36} failed: {test}", flush=True)
    return all((outcomes / str(rank)).exists() for rank in range(ranks))


def run_example(run: Run, example: str, arguments: Sequence[str]) -> bool:
    """Run one of Horovod's examples; print its output and exit code."""
    script = f"examples/{example.split(maxsplit=1)[0]}"
    command = [*launcher(run), script, *arguments]
    if run.options.tensorflow:
        command.insert(command.index(script), str(HERE / "stand_ins/run_with_mnist.py"))
    log = run.scratch / "log"
    code = execute(run, command, run.scratch, log)
    print(f"{example}: exit code {code}\n{log.read_text()}")
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
