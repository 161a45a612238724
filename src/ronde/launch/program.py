"""Check /proc, the working directory and the program before ranks start."""

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
            f"cannot use the current directory: {why}. Change to another one: cd"
        ) from None


def require_processes() -> None:
    """Raise UsageError if ``/proc`` belongs to another pid namespace."""
    try:
        # In another pid namespace it has another number, or none.
        shown = Path("/proc/self").readlink().name
    except OSError:
        shown = "nothing"
    if shown != str(os.getpid()):
        raise UsageError(
            "/proc belongs to another pid namespace: this is process "
            f"{os.getpid()}, but /proc/self is {shown}. ronde could not end all "
            "processes of the job. Type: mount -t proc proc /proc"
        )


def enter_directory(path: str) -> str:
    try:
        if path:
            os.chdir(path)
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO).lower()
        raise UsageError(
            f"cannot enter --chdir {path!r}: {why}. Create it or name another."
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
            f"program {program!r} {problem} (relative to {Path.cwd()}). Check the "
            "spelling and --chdir."
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
        f"program {program!r} is not executable. Type: chmod +x {program}, or name its "
        "interpreter before it."
    )


def _not_allowed(program: str, verb: str) -> UsageError:
    return UsageError(
        f"user {os.geteuid()} on {os.uname().nodename} may not {verb} program "
        f"{program!r}. Type: chmod a+rx {program}, do the same for its directories, or "
        "log in as its owner."
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
        f"program {program!r} is neither a file nor a command on PATH. {advice}"
    )


def find_executable(program: str, *directories: str) -> str | None:
    """Find a program as ``shutil.which`` does, which takes 3 ms to import."""
    paths = (Path(directory or ".") / program for directory in directories)
    # In this order: ``is_file`` raises in an unreadable directory.
    return next((str(p) for p in paths if os.access(p, os.X_OK) and p.is_file()), None)
