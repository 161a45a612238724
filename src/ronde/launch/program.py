"""Check /proc, the directory and the program before an agent starts ranks."""

import errno
import os
import stat
import sys
from pathlib import Path

from ronde.errors import UsageError

_PYTHON = (".py", ".pyz")


def absolute_path(path: str | Path = "") -> Path:
    try:
        return Path(path).absolute()
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise UsageError(
            "current directory must exist, got one that was removed or cannot be "
            f"entered ({why}). Go to another: cd"
        ) from None


def require_processes() -> None:
    """Raise if ``/proc`` does not show this process's descendants."""
    try:
        # In another pid namespace it has another number, or none.
        shown = Path("/proc/self").readlink().name
    except OSError:
        shown = "nothing"
    if shown != str(os.getpid()):
        raise UsageError(
            "/proc must show the processes that ronde starts, or it could not end them "
            f"all; as process {os.getpid()} it shows {shown}. "
            "Type: mount -t proc proc /proc"
        )


def enter_directory(path: str) -> str:
    try:
        if path:
            os.chdir(path)
    except OSError as error:
        raise UsageError(
            f"--chdir must be a directory that can be entered, got {path!r} "
            f"({os.strerror(error.errno or errno.EIO).lower()}). Create it or name "
            "another."
        ) from None
    return str(absolute_path())


def resolve_program(argv: tuple[str, ...], search_path: str) -> list[str]:
    program, *arguments = argv
    if program == "-m":
        return [sys.executable, *argv]
    found = program if "/" in program else _find_command(program, search_path)
    if os.access(f"{found}/__main__.py", os.R_OK):
        return [sys.executable, found, *arguments]
    try:
        mode = Path(found).stat().st_mode
    except PermissionError:
        raise _not_allowed(program, "reach") from None
    except OSError:
        mode = 0
    if not stat.S_ISREG(mode):
        problem = "is a directory" if stat.S_ISDIR(mode) else "does not exist"
        raise UsageError(
            f"program must be a file, got {program!r}, which {problem} "
            f"(seen from {Path.cwd()}). Check the spelling and --chdir."
        )
    is_python = found.endswith(_PYTHON)
    if is_python and not os.access(found, os.R_OK):
        raise _not_allowed(program, "read")
    if os.access(found, os.X_OK):
        return [found, *arguments]
    if mode & 0o111:
        raise _not_allowed(program, "run")
    if is_python:
        return [sys.executable, found, *arguments]
    raise UsageError(
        f"program must be executable, got {program!r}, which is not. "
        f"Type: chmod +x {program}, or name its interpreter before it."
    )


def _not_allowed(program: str, verb: str) -> UsageError:
    return UsageError(
        f"program must be one that user {os.geteuid()} of {os.uname().nodename} may "
        f"{verb}, got {program!r}. Type: chmod a+rx {program}, likewise for its "
        "directories, or log in as its owner."
    )


def _find_command(program: str, search_path: str) -> str:
    found = find_executable(program, *search_path.split(os.pathsep))
    if found is not None:
        return found
    if os.access(f"{program}/__main__.py", os.R_OK):
        return program
    advice = "Check the spelling, or give its path."
    if Path(program).is_file():
        if program.endswith(_PYTHON):
            return program
        advice = f"Did you mean ./{program}?"
    elif program == "python":
        advice = f"Did you mean python3, or {sys.executable}?"
    raise UsageError(
        f"program must be a path or a command on PATH, got {program!r}, which is "
        f"neither. {advice}"
    )


def find_executable(program: str, *directories: str) -> str | None:
    """Find a program like ``shutil.which``, without its import, which takes 3 ms."""
    paths = (Path(directory or ".") / program for directory in directories)
    # In this order: ``is_file`` raises in an unreadable directory.
    return next((str(p) for p in paths if os.access(p, os.X_OK) and p.is_file()), None)
