"""The wheels that a machine with Python and torch alone lacks, for its Python."""

import os
import re
import subprocess
import sys
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = ("2_28", "2_27", "2_17", "2_12", "2_5")
"""manylinux, newest first: pip takes none that is not named."""
MAX_MIB = 60
WANTED = {
    "cloudpickle": "cloudpickle",
    "hypothesis": "hypothesis",
    "iniconfig": "iniconfig",
    "numpy": "numpy",
    "nvidia-ml-py": "pynvml",
    "packaging": "packaging",
    "pluggy": "pluggy",
    "Pygments": "pygments",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "sortedcontainers": "sortedcontainers",
}
"""Distributions, and the module that each is there for."""


class PackingError(Exception):
    """The wheels cannot be gathered."""


def pack(root: Path, folder: Path) -> str:
    """Fill ``folder`` with the wheels of ``constraints.txt``; return their names.

    Raises:
        PackingError: pip did not get one, or all together are too large.
    """
    pins = _pins(root)
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_{each}_x86_64" for each in PLATFORMS]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"),
        *(*platforms, "--dest", str(folder), *pins),
    ]
    # PYTHONPATH is this script's own; pip needs none of it.
    names = ("PYTHONPATH",)
    env = {k: v for k, v in os.environ.items() if k not in names}  # noqa: TID251
    if subprocess.run(command, env=env, check=False).returncode:
        raise PackingError(f"pip must get these wheels, got none: {' '.join(command)}")
    for wheel in folder.glob("*.whl"):
        if _pin(wheel) not in {_normal(pin) for pin in pins}:
            wheel.unlink()  # of another version, from an earlier call
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(pins):
        raise PackingError(
            f"{folder} must hold one wheel for each of {len(pins)} distributions, got "
            f"{len(wheels)}. Empty it, and try again."
        )
    mib = sum(wheel.stat().st_size for wheel in wheels) / (1 << 20)
    if mib > MAX_MIB:
        raise PackingError(f"wheels must be at most {MAX_MIB} MiB, got {mib:.1f} MiB.")
    return f"{len(wheels)} wheels for Python {PYTHON}, {mib:.1f} MiB, in {folder}"


def _pins(root: Path) -> list[str]:
    """Return ``name==version`` for all that is wanted."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = {_normal(line.partition("==")[0]): line for line in lines if "==" in line}
    lacking = [name for name in WANTED if _normal(name) not in pins]
    if lacking:
        raise PackingError(f"constraints.txt must pin {', '.join(lacking)}.")
    return [pins[_normal(name)] for name in WANTED]


def _pin(wheel: Path) -> str:
    """Return ``name==version`` of a wheel, by its file's name."""
    name, version = wheel.name.split("-")[:2]
    return _normal(f"{name}=={version}")


def _normal(name: str) -> str:
    """Return a name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()
