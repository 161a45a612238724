"""``ronde completion``, in real shells."""

import os
import pty
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.commands import refusal
from tests.limits import HANG_S

from ronde.cli import main

SOURCE = Path(__file__).parents[2] / "src" / "ronde"
COMMANDS = sorted(
    {
        usage
        for path in SOURCE.rglob("*.py")
        for usage in re.findall(r"usage: (ronde(?: [a-z]+\b)+)", path.read_text())
    }
    | {"ronde horovodrun"}
)
# What is typed before Tab, and what the line is then.
TYPED = {
    "ronde r": "ronde run",
    "ronde run --ela": "ronde run --elastic-timeout",
    "ronde run --launcher sl": "ronde run --launcher slurm",
    "ronde run -H a:4,b:4 --gp": "ronde run -H a:4,b:4 --gpu-view",
    "ronde plan v": "ronde plan validate",
    "ronde run tr": "ronde run train.py",
    "ronde run --log-dir da": "ronde run --log-dir data",
    "ronde run -- --ela": "ronde run -- --ela",
    "ronde run -n 2 train.py --ela": "ronde run -n 2 train.py --ela",
    "ronde run train.py da": "ronde run train.py data",
}
BARE = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


@contextmanager
def shell_in_terminal(name: str, cwd: Path) -> Iterator[Callable[[str], str]]:
    """Yield a function that types a line, and returns what it prints as <...>."""
    own, side = pty.openpty()
    shell = subprocess.Popen(
        [path_of(name), BARE[name], "-i"],
        cwd=cwd,
        env={"PATH": os.defpath, "HOME": str(cwd), "TERM": "dumb", "PS1": ""},
        stdin=side,
        stdout=side,
        stderr=side,
        process_group=0,
    )
    os.close(side)

    def type_line(line: str) -> str:
        os.write(own, f"{line}\n".encode())
        shown = b""
        while not (match := re.search(rb"<(.*?)>\r?\n", shown)):
            shown += os.read(own, 4096)
        return match[1].decode()

    try:
        yield type_line
    finally:
        shell.kill()
        shell.wait()
        os.close(own)


def path_of(shell: str) -> str:
    path = shutil.which(shell, path=os.defpath)
    return path or pytest.skip(f"{shell} is not installed")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(
    ("name", "before"), [("bash", ""), ("zsh", "autoload -U compinit; compinit -u -D;")]
)
def test_tab_completes_in_a_terminal(
    name: str, before: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = directory / "script"
    script.write_text(printed(capsys, "completion", name))
    with shell_in_terminal(name, directory) as type_line:
        type_line(f'{before} . {script}; ronde() {{ echo "<ronde $*>"; }}; ronde')
        completed = [type_line(f"{typed}\t").rstrip(" /") for typed in TYPED]
    assert completed == list(TYPED.values())


def test_fish_completes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [path_of("fish"), BARE["fish"], "-c"]
    asked = printed(capsys, "completion", "fish")
    for typed in TYPED:
        asked += f"echo (complete -C '{typed}')\n"
    done = subprocess.run(
        [*words, asked],
        cwd=directory,
        env={"PATH": os.defpath, "HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stderr == ""
    assert [line.rstrip("/") for line in done.stdout.splitlines()] == [
        "" if typed == completed else completed.split()[-1]
        for typed, completed in TYPED.items()
    ]


@pytest.fixture
def complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], list[set[str]]]:
    """Return the words that bash offers behind each of several lines."""
    script = tmp_path / "script"
    script.write_text(printed(capsys, "completion", "bash"))

    def run(lines: list[str]) -> list[set[str]]:
        asked = [f"source {script}"]
        for line in lines:
            words = shlex.join(line.split(" "))
            last = len(line.split(" ")) - 1
            asked.append(f"COMP_WORDS=({words}) COMP_CWORD={last}; _ronde")
            asked.append('echo "${COMPREPLY[*]}"')
        done = subprocess.run(
            [path_of("bash"), "-c", "\n".join(asked)],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        assert done.stderr == ""
        return [set(shown.split()) for shown in done.stdout.splitlines()]

    return run


def test_every_option_of_every_help_is_offered(
    complete: Callable[[list[str]], list[set[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {"ronde run", "ronde plan validate", "ronde bench train"} <= {*COMMANDS}
    offered = complete([f"{command} -" for command in COMMANDS])
    for command, words in zip(COMMANDS, offered, strict=True):
        own = ["show"] if command == "ronde topo" else []
        text = printed(capsys, *command.split()[1:], *own, "--help")
        shown = re.findall(r"^  (-[^\s,]+(?:, -[^\s,]+)*)", text, re.MULTILINE)
        options = {n.replace("[no-]", "") for line in shown for n in line.split(", ")}
        assert options <= words, command
        assert options


def test_verbs_and_values_are_offered(
    complete: Callable[[list[str]], list[set[str]]],
) -> None:
    cases = {
        "ronde run --launcher ": {"auto", "ray", "slurm", "ssh"},
        "ronde run --launcher = s": {"slurm", "ssh"},
        "ronde run --bind ": {"auto", "core", "none", "numa"},
        "ronde run -n ": set[str](),
        "ronde run ": set[str](),
        "ronde trace ": {"merge", "show"},
        "ronde check ": {"explain", "list", "read"},
        "ronde completion ": {"bash", "fish", "zsh"},
        "ronde topo lint --rule": {"--rule", "--rules"},
        "ronde run train.py -": set[str](),
        "ronde run -- ": set[str](),
    }
    assert dict(zip(cases, complete([*cases]), strict=True)) == cases


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'csh'" in refusal(capsys, "completion", "csh")
    assert "fish" in printed(capsys, "completion")
