"""What words and variables ask for, and what is refused before anything starts."""

import re
import subprocess
import sys

import pytest
from tests.commands import refusal

from ronde.bench import Exit, UnsupportedError, parse, read_variables
from ronde.errors import UsageError


def sizes(*words: str) -> list[int]:
    return list(parse(["all_reduce", *words]).sweep.sizes())


def test_sizes_are_swept_by_factor_or_by_step() -> None:
    assert sizes("-b", "8", "-e", "1K", "-f", "4") == [8, 32, 128, 512]
    assert sizes("-b", "1k", "-e", "4K", "-i", "1024") == [1024, 2048, 3072, 4096]
    assert sizes() == [32 << 20]
    assert sizes("-b", "1M", "-e", "3M", "-f", "1") == [1 << 20, 2 << 20, 3 << 20]


def test_flags_are_written_as_theirs_or_ours() -> None:
    theirs = parse(["all_reduce_perf", "-b8", "-e", "1M", "-d", "half", "-o", "avg"])
    words = "all_reduce --minbytes=8 --maxbytes 1M --dtype float16 --op average"
    ours = parse(words.split())
    assert theirs.sweep == ours.sweep
    assert theirs.test.name == "all_reduce"
    assert parse(["broadcast", "-r", "-1"]).sweep.roots(ours.test, 3) == [-1]
    both = [parse(["broadcast", "-r", root]) for root in ("-1", "all")]
    assert [o.sweep.roots(o.test, 3) for o in both] == [[0, 1, 2]] * 2


def test_all_takes_their_order() -> None:
    sweep = parse(["reduce", "-d", "all", "-o", "all"]).sweep
    names = "int8 uint8 int32 uint32 int64 uint64 half float double bfloat16"
    assert " ".join(d.name for d in sweep.dtypes) == f"{names} f8e4m3 f8e5m2"
    assert sweep.ops == ("sum", "prod", "max", "min", "avg", "mulsum")
    assert parse(["broadcast", "-o", "all"]).sweep.ops == ("none",)


def test_ignored_flags_are_named() -> None:
    options = parse(["all_reduce", "-p", "1", "-V", "4", "-G", "2", "--lenient"])
    assert options.ignored == ("-G 2", "-p 1", "-V 4")


@pytest.mark.parametrize("words", [("-G", "1"), ("-R", "2"), ("-D", "1")])
def test_what_cannot_be_had_here_has_its_own_code(words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match=f"{words[0]} {words[1]}.*--lenient"):
        parse(["all_reduce", *words])


WRONG = {
    "-d complex": "one of int8, uint8.*got 'complex'",
    "-o xor": "one of sum, prod.*got 'xor'",
    "-b 8M -e 1M": "at most -e, got 8388608 and 1048576 bytes",
    "-b 0": "-b must be at least 1",
    "-b eight": "-b: size must be",
    "-i 0": "-i must be at least 1",
    "-n 0": "-n must be a whole number of at least 1",
    "-n 2 -K 2": "-K must be less than -n, which is 2",
    "-z 4": "-z must be a whole number from 0 to 3",
    "-a 4": "-a must be a whole number from 0 to 3",
    "-r two": "-r must be a rank",
    "-J out.txt": "ends in .json",
    "-Q 1": "unknown option -Q",
    "--itesr 5": "unknown option --itesr. Did you mean --iters?",
    "--compare gloo": "two or more different engines",
    "--engine ucc": "--engine must be one of auto, .*got 'ucc'",
    "--algorithm square": "--algorithm must be one of ring",
    "--compare gloo,shared_memory -J a.json": "-J and --compare cannot",
    "-J /nowhere/at/all.json": "-J must be a file in a directory that exists",
    "-b 1P -e 1P --device cpu -g 2": r"-b must be at most \d+ \(.*\), got \d+: larger",
    "-x 3": "-x must be 0, 1 or 2",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_words_are_refused_in_one_sentence(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "bench", "all_reduce", *words.split(), code=Exit.USAGE)
    assert said.count("\n") == 1
    assert re.search(WRONG[words], said)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from ronde.cli import main; main(['bench', '--help']); "
        "main(['bench', 'all_reduce', '-d', 'odd']); print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ended.stdout.endswith("False\n")
    assert "usage: ronde bench COLLECTIVE" in ended.stdout


@pytest.mark.parametrize(
    ("text", "colours"),
    [
        ("MOD 2", [0, 1, 0, 1]),
        ("% 0x2", [0, 1, 0, 1]),
        ("div 2", [0, 0, 1, 1]),
        (" / 0b10 ", [0, 0, 1, 1]),
        ("AND1", [0, 1, 0, 1]),
        ("| 3", [3, 3, 3, 3]),
    ],
)
def test_splits_are_read_as_theirs(text: str, colours: list[int]) -> None:
    split = read_variables({"NCCL_TESTS_SPLIT": text}).split
    assert split is not None
    assert [split.colour_of(rank) for rank in range(4)] == colours


def test_the_mask_wins() -> None:
    said = {"NCCL_TESTS_SPLIT": "MOD 3", "NCCL_TESTS_SPLIT_MASK": "0x2"}
    split = read_variables(said).split
    assert split is not None
    assert [split.colour_of(rank) for rank in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    "said",
    [
        {"NCCL_TESTS_SPLIT": "XOR 2"},
        {"NCCL_TESTS_SPLIT": "MOD 0"},
        {"NCCL_TESTS_SPLIT": "MOD two"},
        {"NCCL_TESTS_MIN_BW": "fast"},
        {"NCCL_TESTS_DEVICE": "-1"},
    ],
)
def test_variables_that_cannot_be_are_refused(said: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(said))):
        read_variables(said)


def test_no_secret_is_quoted() -> None:
    said = {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "s", "RONDE_COOKIE": "c"}
    assert read_variables(said).shown == ("NCCL_DEBUG=INFO",)
