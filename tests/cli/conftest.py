import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.cli import main
from ronde.launch import own_environment

RondeHere = Callable[..., "subprocess.CompletedProcess[bytes]"]

_KEPT = frozenset(
    {
        *("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL"),
        *("TMPDIR", "LANG", "TZ", "PYTHONDONTWRITEBYTECODE"),
    }
)


def clean_environment(*more: str) -> dict[str, str]:
    """Return of this process's environment what programs need on this machine.

    What else a user or a launcher has set would change what the tests see.

    Args:
        more: Names of variables to keep, too.
    """
    return {
        name: value
        for name, value in own_environment().items()
        if name in _KEPT or name.startswith("LC_") or name in more
    }


def read_lines(process: "subprocess.Popen[bytes]", words: bytes, times: int = 1):
    """Read standard output until lines with the words came so often."""
    lines = []
    while sum(words in line for line in lines) < times:
        ready, _, _ = select.select([process.stdout], [], [], HANG_S)
        line = process.stdout.readline() if ready else b""
        assert line, lines
        lines.append(line)
    return lines


@dataclass(frozen=True)
class Ronde:
    """Runs the command in a process of its own."""

    program: Sequence[str] = (sys.executable, "-m", "ronde")

    def command(self, *words: str) -> list[str]:
        return [*self.program, *words]

    def start(
        self, *words: str, env: Mapping[str, str] | None = None, **popen
    ) -> "subprocess.Popen[bytes]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # Unbuffered: select() does not see what a buffer holds.
        pipes |= {"stdin": subprocess.DEVNULL, "bufsize": 0} | popen
        return subprocess.Popen(
            self.command(*words), env=clean_environment() | dict(env or {}), **pipes
        )

    def __call__(
        self, *words: str, env: Mapping[str, str] | None = None, **popen
    ) -> "subprocess.CompletedProcess[bytes]":
        with self.start(*words, env=env, **popen) as process:
            try:
                out, err = process.communicate(timeout=HANG_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture(scope="session")
def ronde() -> Ronde:
    return Ronde()


@pytest.fixture
def ronde_here(capfd: pytest.CaptureFixture[str]) -> RondeHere:
    """Return the command in this process: half the work, where no rank is started."""

    def run(
        *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        with pytest.MonkeyPatch.context() as patch:
            for name in own_environment().keys() - clean_environment().keys():
                patch.delenv(name)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            code = main(words)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(words, code, out.encode(), err.encode())

    return run
