import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from ronde.launch.forwarded import base_environment
from ronde.launch.inherited import own_environment

_TIMEOUT_S = 60


def clean_environment() -> dict[str, str]:
    """Return this process's environment as it is outside of any launcher."""
    env = base_environment(own_environment())
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    for name in (*places, "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        env.pop(name, None)
    return env


@dataclass(frozen=True)
class Ronde:
    """Runs the command in a process of its own."""

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ronde", *words]

    def start(
        self, *words: str, env: Mapping[str, str] | None = None, **popen
    ) -> "subprocess.Popen[bytes]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen
        return subprocess.Popen(
            self.command(*words),
            env=clean_environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            **pipes,
        )

    def __call__(
        self, *words: str, env: Mapping[str, str] | None = None, **popen
    ) -> "subprocess.CompletedProcess[bytes]":
        with self.start(*words, env=env, **popen) as process:
            try:
                out, err = process.communicate(timeout=_TIMEOUT_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture(scope="session")
def ronde() -> Ronde:
    return Ronde()
