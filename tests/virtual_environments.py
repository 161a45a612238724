"""Virtual environments that have all that the tests' own has, and are thrown away."""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.cli.conftest import clean_environment

_HOROVOD = {
    "horovod-0.28.1.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    ),
    "horovod/__init__.py": "",
    "horovod/torch.py": "",
}


@dataclass(frozen=True)
class VirtualEnvironment:
    """A Python with packages of its own.

    Attributes:
        python: Its interpreter.
        packages: Its site-packages.
    """

    python: Path
    packages: Path

    @property
    def horovodrun(self) -> Path:
        return self.python.parent / "horovodrun"

    def ronde(self, *words: str, before: tuple[str, ...] = (), **env: str):
        """Run ``ronde`` by this Python; return exit code, output and errors."""
        return self.run(*before, str(self.python), "-m", "ronde", *words, **env)

    def run(self, *words: str, **env: str):
        """Run a command outside any launcher; return exit code, output and errors."""
        done = subprocess.run(
            words,
            env=clean_environment() | {"OMP_NUM_THREADS": "1"} | env,
            cwd=self.python.parents[1],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def add_horovod(self) -> None:
        """Make it look as if Horovod itself were installed."""
        for name, text in _HOROVOD.items():
            file = self.packages / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        self.horovodrun.write_text("#!/bin/sh\necho the real one\n")
        self.horovodrun.chmod(0o755)


def make_environment(folder: Path) -> VirtualEnvironment:
    """Make one in a folder that is not there yet."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "tests.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return VirtualEnvironment(folder / "bin" / "python", packages)
