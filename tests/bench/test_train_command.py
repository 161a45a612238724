"""``ronde bench train``: the command, its record, and what it refuses."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from tests.cli.conftest import Ronde, clean_environment
from tests.commands import refusal
from tests.limits import HANG_S

from ronde.bench import Exit
from ronde.records import read_records

TRAIN = ("bench", "train", "--model", "mnist_cnn", "--device", "cpu")
SHORT = ("--batch", "4", "--rounds", "2", "--steps", "2", "--warmup", "1")
WITHOUT_PEERS = ("one_rank", "all_ranks", "no_communication")
ronde = Ronde()


def test_two_ranks_of_its_own(tmp_path):
    path = tmp_path / "records"
    others = ("--reduce", "parameter_server", "--peer")
    ended = ronde(*TRAIN, *SHORT, *others, "-n", "2", "--json", str(path))
    assert (ended.returncode, ended.stderr) == (0, b"")
    text = ended.stdout.decode()
    assert text.count("# mnist_cnn: 21,840 parameters") == 1
    for row in ("no communication", "parameter server", "DistributedDataParallel"):
        assert text.count(f"\n2 ranks, {row} ") == 1
        is_compared = row != "no communication"
        assert text.count(f" times as fast as 2 ranks, {row}\n") == is_compared
    assert "of the ceiling" in text
    (record,) = read_records(path, "bench_train")
    values = record.values
    assert (values["num_ranks"], values["num_steps"], values["batch_a_rank"]) == (
        2,
        2,
        4,
    )
    assert values["is_in_step"]
    variants = values["variants"]
    reductions = ["parameter_server", "peer"]
    assert list(variants) == [*WITHOUT_PEERS, *reductions]
    assert list(values["speed_over"]) == reductions
    assert (values["engine"], values["algorithm"]) == ("shared_memory", "")
    assert (values["collective_backend"], values["hosts"]) == ("shared_memory", [2])
    assert sum(numel for numel, _, _ in values["gradients"]) == 21_840
    assert sum(values["buckets"]["num_gradients"]) == len(values["gradients"])
    assert set(values["steps_ms"]) == set(WITHOUT_PEERS)
    assert min(values["spread"].values()) >= 0
    assert all("exposed_ms" in variants[each] for each in ("all_ranks", *reductions))
    assert (values["framework"], values["reduce"]) == ("torch", "parameter_server")
    assert all(len(each["rounds_step_ms"]) == 2 for each in variants.values())
    both = variants["all_ranks"]
    assert both["units_per_s"] == pytest.approx(2 * 4 / both["step_ms"] * 1e3)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_of_a_launcher(tmp_path, size):
    path = tmp_path / "records"
    words = ("--", sys.executable, "-m", "ronde", *TRAIN, *SHORT, "--json", str(path))
    options = ("--input", "gathered")
    ended = ronde("run", "-n", str(size), "--no-prefix", *words, *options)
    assert (ended.returncode, ended.stderr) == (0, b"")
    (record,) = read_records(path)
    assert record.values["num_ranks"] == size
    assert record.values["hosts"] == [size]
    has_buckets = record.values["buckets"] is not None
    assert has_buckets == (record.values["spread"] is not None) == (size > 1)
    rows = [row for row in ended.stdout.decode().splitlines() if row[:1] not in "# "]
    assert rows[0].split()[:2] == ["1", "rank"]
    assert len(rows) == (1 if size == 1 else 3)


def test_another_number_of_ranks_than_the_launcher_has_started():
    words = ("--", sys.executable, "-m", "ronde", *TRAIN, "-n", "3")
    ended = ronde("run", "-n", "2", "--no-prefix", *words)
    assert ended.returncode == 6
    assert b"-n must be 2, the number of ranks that ronde has started" in ended.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model", "resnet51"), "model must be one of alexnet, googlenet, gpt2,"),
        ((), "--model is required"),
        (("--model", "mlp", "--batch", "many"), "invalid int value: 'many'"),
        (
            ("--model", "mlp", "--dtype", "half"),
            "--dtype must be float32 or bfloat16, got 'half'",
        ),
        (("--model", "mlp", "--engine", "tin_can"), "--engine must be one of auto,"),
        (("--model", "mlp", "-n", "0"), "-n must be at least 1, got 0."),
        (("--model", "mlp", "--json", "/nowhere/at/all"), "Type: mkdir -p /nowhere/at"),
        (
            ("--model", "mlp", "--framework", "mxnet"),
            "must be torch, tensorflow, keras or jax, got",
        ),
        (
            ("--model", "mlp", "--reduce", "ring"),
            "--reduce must be all_reduce or parameter_server, got",
        ),
        (
            ("--model", "gpt2", "--framework", "jax"),
            "resnet50 with --framework jax, got gpt2. Leave --framework out.",
        ),
        *(
            (
                ("--model", "resnet50", "--framework", "keras", *option.split()),
                f"{option} needs --framework torch, got keras. Leave out one",
            )
            for option in (
                *("--reduce parameter_server", "--dtype bfloat16"),
                *("--channels-last", "--device cuda"),
            )
        ),
        *(
            pytest.param(
                ("--model", "mlp", "--framework", name),
                f"{name} must be installed for this front end, got none. Type: pip",
                marks=pytest.mark.skipif(
                    find_spec(name) is not None, reason=f"{name} is installed"
                ),
            )
            for name in ("tensorflow", "keras", "jax")
        ),
    ],
)
def test_bad_words_are_one_sentence(capsys, words, sentence):
    said = refusal(capsys, "bench", "train", *words, code=Exit.USAGE)
    assert said.count("\n") == 1
    assert sentence in said


def test_what_is_refused_does_not_wait_for_torch():
    command = [sys.executable, "-X", "importtime", "-m", "ronde", "bench", "train"]
    ended = subprocess.run(
        [*command, "--model", "gpt2", "--channels-last"],
        capture_output=True,
        env=clean_environment(),
        timeout=HANG_S,
        check=False,
    )
    lines = ended.stderr.decode().splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    assert len(imports) > 50
    assert not [line for line in imports if line.split("|")[-1].strip() == "torch"]
    (said,) = set(lines) - set(imports)
    assert said.startswith("ronde: ")
    assert "whose input is images, got gpt2." in said
    assert (ended.returncode, ended.stdout) == (Exit.USAGE, b"")
