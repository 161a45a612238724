"""What an agent checks before anything starts: /proc, directory and program."""

import errno
import os
import sys
from pathlib import Path

from ronde.errors import UsageError


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
    """See that ``/proc`` shows this process's descendants, as sweeping them needs."""
    try:
        # Another namespace's has another number for this process, or none.
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
    is_path = "/" in program
    found = (
        program if is_path else find_executable(program, *search_path.split(os.pathsep))
    )
    if found is None and program.endswith(".py") and Path(program).is_file():
        found = program
    if found is None:
        raise UsageError(
            f"program must be a path or a command on PATH, got {program!r}, which is "
            f"neither. {_advice(program)}"
        )
    _require_allowed(program, found)
    if not Path(found).is_file():
        what = "is a directory" if Path(found).is_dir() else "does not exist"
        raise UsageError(
            f"program must be a file, got {program!r}, which {what} "
            f"(seen from {Path.cwd()}). Check the spelling and --chdir."
        )
    if os.access(found, os.X_OK):
        return [found, *arguments]
    if found.endswith(".py"):
        return [sys.executable, found, *arguments]
    raise UsageError(
        f"program must be executable, got {program!r}, which is not. "
        f"Type: chmod +x {program}, or name its interpreter before it."
    )


def _require_allowed(program: str, path: str) -> None:
    """Refuse what is for others: a host's ranks may be another user's than we are."""
    what = ""
    try:
        is_program = bool(Path(path).stat().st_mode & 0o111)
    except PermissionError:
        what = "reach"
    except OSError:
        return
    else:
        if path.endswith(".py") and not os.access(path, os.R_OK):
            what = "read"
        elif is_program and not os.access(path, os.X_OK):
            what = "run"
    if what:
        raise UsageError(
            f"program must be one that user {os.geteuid()} of {os.uname().nodename} "
            f"may {what}, got {program!r}. Type: chmod a+rx {program}, likewise for "
            "its directories, or log in as its owner."
        )


def find_executable(program: str, *directories: str) -> str | None:
    """Do what ``shutil.which`` does; importing that takes an agent 3 ms."""
    paths = (Path(directory or ".") / program for directory in directories)
    # In this order: of a directory that is closed to us ``is_file`` raises.
    return next((str(p) for p in paths if os.access(p, os.X_OK) and p.is_file()), None)


def _advice(program: str) -> str:
    if Path(program).is_file():
        return f"Did you mean ./{program}?"
    if program == "python":
        return f"Did you mean python3, or {sys.executable}?"
    return "Check the spelling, or give its path."
