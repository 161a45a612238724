"""``ronde alias``: make ``import horovod`` find ronde in this environment."""

import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ronde.arguments import CommandParser, require_alone
from ronde.errors import UsageError
from ronde.launch.environments import ALIAS_DIRECTORY, find_horovod

_HELP = """\
usage: ronde alias [--install | --remove]

Make import horovod find ronde in every Python of this environment: under mpirun, srun,
torchrun, plain Python and notebooks. Programs under ronde run need no alias.

The alias is a .pth file in site-packages and the command horovodrun in bin. Without an
option, show if it is installed.

options:
  --install   write both; an error if Horovod itself is installed
  --remove    remove both, but not another program's horovodrun
  -h, --help  show this help and exit
"""

# To Python the second line is a string. It is there because #! cannot name a long path,
# or one with a space.
_COMMAND = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
# Written by ronde alias --install; ronde alias --remove removes it.
import sys

from ronde.__main__ import main

sys.argv.insert(1, "horovodrun")
sys.exit(main())
"""
_OURS = "\nfrom ronde."


def run(words: Sequence[str]) -> int:
    options = CommandParser("ronde alias", _HELP).read(words)
    if options is None:
        return 0
    require_alone(options, "--install", "--remove")
    path_file = Path(sysconfig.get_path("purelib"), "ronde-horovod.pth")
    command = Path(sysconfig.get_path("scripts"), "horovodrun")
    try:
        if options.install:
            print(_install(path_file, command))
        elif options.remove:
            print(_remove(path_file, command))
        else:
            print(_state(path_file))
    except OSError as error:
        raise UsageError(
            f"cannot change {path_file} and {command}: {error.strerror}. Use a virtual "
            "environment (python -m venv), or put the alias on the path: export "
            f"PYTHONPATH={ALIAS_DIRECTORY}"
        ) from None
    return 0


def _install(path_file: Path, command: Path) -> str:
    if horovod := _installed_horovod():
        raise UsageError(
            f"the alias cannot be installed, as this environment has {horovod}. Type: "
            "pip uninstall horovod, or use the alias for one job: ronde run "
            "--horovod-alias"
        )
    if os.path.lexists(command) and not _is_ours(command):
        raise UsageError(
            f"{command} exists and was not written by ronde. Remove it, then type: "
            "ronde alias --install"
        )
    text = _COMMAND.format(python=sys.executable)
    wanted = {path_file: f"{ALIAS_DIRECTORY}\n", command: text}
    if all(file.is_file() and file.read_text() == wanted[file] for file in wanted):
        return f"the alias is installed already: {path_file} and {command}"
    try:
        for file, text in wanted.items():
            _write(file, text)
    except OSError:
        with suppress(OSError):
            _remove(path_file, command)
        raise
    return f"installed: import horovod finds ronde, by {path_file}; {command}"


def _remove(path_file: Path, command: Path) -> str:
    found = [path_file] if path_file.exists() else []
    found += [command] if _is_ours(command) else []
    for file in found:
        file.unlink()
    if not found:
        return f"the alias is not installed: there is no {path_file}"
    return f"removed: {' and '.join(map(str, found))}"


def _state(path_file: Path) -> str:
    if horovod := _installed_horovod():
        return f"not installed, and cannot be beside {horovod}"
    if not path_file.exists():
        return "not installed. Type: ronde alias --install"
    leads_to = path_file.read_text().strip()
    if leads_to != str(ALIAS_DIRECTORY):
        return f"{path_file} leads to {leads_to}. Type: ronde alias --install"
    return f"installed: import horovod finds ronde, by {path_file}"


def _installed_horovod() -> str:
    """Return a description of the installed Horovod, or an empty text."""
    if package := find_horovod(sys.path):
        return f"the package {package}"
    try:
        return f"the distribution horovod {distribution('horovod').version}"
    except PackageNotFoundError:
        return ""


def _is_ours(command: Path) -> bool:
    return command.is_file() and _OURS in command.read_text(errors="replace")


def _write(file: Path, text: str) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_text(text)
        new.chmod(0o755 if text.startswith("#!") else 0o644)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
