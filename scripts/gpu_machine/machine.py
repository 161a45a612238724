"""An environment of our own on top of the machine's torch, made without a network."""

import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_machine.packing import PYTHON


class MachineError(Exception):
    """This machine lacks something."""


def unpack(folder: Path, site: Path) -> list[Path]:
    """Unpack the wheels in ``folder``; return where to.

    A wheel is a zip file of what belongs into ``site-packages``: pip is not needed.

    Raises:
        MachineError: There are none, or they are for another Python.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise MachineError(
            f"--wheels must be a folder of wheels, got {folder} with none. Where there "
            "is a network, type: scripts/gpu --pack"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != PYTHON:
        raise MachineError(
            f"Python must be {PYTHON}, for which the wheels are, got {version}. Type: "
            f"PYTHON=python{PYTHON} scripts/gpu"
        )
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return [site]


def make_environment(root: Path, folder: Path, sites: Sequence[Path]) -> Path:
    """Make a virtual environment that sees ``sites``, ronde, and then this Python's.

    Not ``--system-site-packages``: torch may itself be in a virtual environment.

    Returns:
        Its interpreter.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    names = ("site-packages", "dist-packages")
    own = [
        path
        for path in sys.path
        if path and (Path(path).name in names or (Path(path) / "torch").is_dir())
    ]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = [*map(str, sites), str(root / "src")]
    lines = [*paths, *(f"import site; site.addsitedir({path!r})" for path in own)]
    site = folder / "lib" / version / "site-packages"
    (site / "machine.pth").write_text("".join(f"{line}\n" for line in lines))
    return folder / "bin" / "python"
