"""The parts of a run, the most valuable first, since the last may not fit."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RONDE = ("-m", "ronde")
PYTEST = (
    *("-m", "pytest", "-v", "-p", "pytest_timeout", "-p", "no:cacheprovider"),
    # A library's new warning must not fail all tests of the first run on a machine.
    *("-W", "default"),
)
STEPS = (
    *("benchmarks/training_step.py", "--variants"),
    *("none", "ronde", "ronde_group", "ddp", "ddp_tuned"),
)
ALL_REDUCE = (*RONDE, "bench", "all_reduce")
TRAIN = (*RONDE, "bench", "train", "--model")


@dataclass(frozen=True, slots=True)
class Part:
    """One command and its time limit.

    Attributes:
        name: Of the part.
        log: Which log its output goes to: facts, tests, tools or benchmarks.
        words: For the interpreter of the environment.
        limit_s: When it is killed.
        passing: Exit codes that are no failure.
        records: File of records that it appends to; or empty.
        junit: File of results that it writes; or empty.
    """

    name: str
    log: str
    words: list[str]
    limit_s: float
    passing: tuple[int, ...] = (0,)
    records: str = ""
    junit: str = ""


def facts_part(scratch: Path) -> Part:
    """Check the machine and the modules."""
    path = str(scratch / "facts.jsonl")
    words = [str(HERE / "facts.py"), path]
    return Part("facts", "facts", words, 90.0, records=path)


def gpu_parts(scratch: Path, num_gpus: int) -> list[Part]:
    """Return the parts for a machine with so many GPUs."""
    make = _Maker(scratch)
    cuda = ("--device", "cuda")
    image = ("--dtype", "bfloat16", "--channels-last", "--rounds", "3", *cuda)
    text = ("--dtype", "bfloat16", "--optimizer", "adam", "--rounds", "3", *cuda)
    ranks = ("-n", str(num_gpus))
    nccl = ("-g", str(num_gpus), "-b", "8", "-e", "256M", "-f", "8", *cuda)
    several = [make.measure("all_reduce", (*ALL_REDUCE, *nccl), 60.0)]
    return [
        make.test("nccl", 200.0),
        make.test("training", 90.0),
        make.measure("steps", (*STEPS, *cuda, "--builds=3", "--steps=20"), 60.0),
        make.measure("sharing", (str(HERE / "sharing.py"),), 75.0),
        *(several if num_gpus > 1 else []),
        make.test("streams", 60.0),
        make.measure(
            "train resnet50", (*TRAIN, "resnet50", "--batch=64", *image, *ranks), 60.0
        ),
        *make.tools(num_gpus),
        make.test("front_end", 60.0),
        make.test("check", 60.0),
        make.test("topo", 40.0),
        make.test("bench", 90.0),
        make.measure("train gpt2", (*TRAIN, "gpt2", "--batch=8", *text, *ranks), 60.0),
        make.test("bench_train", 60.0),
        make.measure("train mlp", (*TRAIN, "mlp", "--rounds=3", *cuda, *ranks), 40.0),
    ]


def rehearsal_parts(scratch: Path) -> list[Part]:
    """Return the same kinds of parts, small, for the CPU.

    Tests of GPUs skip themselves; those of one engine on the CPU stand for them.
    """
    make = _Maker(scratch)
    limit_s = 120.0  # each takes a few seconds where nothing else runs
    tiny = ("--builds=1", "--rounds=2", "--steps=2", "--models", "mnist_cnn")
    shared = ("-g", "2", "-b", "8", "-e", "32K", "-f", "8", "-n", "5", "--device=cpu")
    train = (*TRAIN, "mnist_cnn", "-n", "1", "--rounds=1", "--steps=2", "--device=cpu")
    tests = ("tests/gpu", "tests/conformance/test_engines.py", "-k", "gpu or solo")
    return [
        make.test("rehearsal", limit_s, tests),
        make.measure("steps", (*STEPS, *tiny), limit_s),
        make.measure("all_reduce", (*ALL_REDUCE, *shared), limit_s),
        make.measure("train mnist_cnn", train, limit_s),
        *make.tools(1),
    ]


class _Maker:
    """Makes parts that leave their results below one folder."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def test(self, name: str, limit_s: float, words: Iterable[str] = ()) -> Part:
        """Run the tests of one file of ``tests/gpu``, or others."""
        junit = str(self._scratch / f"{name}.xml")
        chosen = words or (f"tests/gpu/test_{name}.py",)
        command = [*PYTEST, f"--junit-xml={junit}", *chosen]
        return Part(f"tests {name}", "tests", command, limit_s, junit=junit)

    def measure(self, name: str, words: Iterable[str], limit_s: float) -> Part:
        """Run a benchmark that takes ``--json FILE``."""
        path = str(self._scratch / f"{name}.jsonl")
        command = [*words, "--json", path]
        return Part(name, "benchmarks", command, limit_s, records=path)

    def tools(self, num_ranks: int) -> list[Part]:
        """Look at the machine with ronde's own tools."""
        found = (0, 1)  # what lint finds is a result, not a failure
        return [
            Part("topo", "tools", [*RONDE, "topo"], 20.0),
            Part("topo lint", "tools", [*RONDE, "topo", "lint"], 20.0, found),
            Part(
                *("topo place", "tools"),
                [*RONDE, "topo", "place", "-n", str(num_ranks)],
                20.0,
            ),
            Part("topo limit", "tools", [*RONDE, "topo", "limit"], 20.0),
            # So is what makes a host not ready.
            Part("check", "tools", [*RONDE, "check"], 60.0, (0, 2)),
        ]
