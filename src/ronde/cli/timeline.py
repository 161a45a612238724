"""``ronde run --timeline``: where ranks put their records, and what becomes of them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.program import absolute_path
from ronde.timeline.part import SUFFIX
from ronde.timeline.recording import DEFAULT_LIMIT_BYTES, write_merged
from ronde.units import parse_size_bytes


@contextmanager
def recorded(file: str, limit: str) -> Generator[dict[str, str]]:
    """Have the ranks of a job record; write the trace of all when it is over.

    However the job ends: what each rank had written down by then is in the trace. The
    parts are removed once they are in it.

    Args:
        file: The trace.
        limit: Its size, with a unit; empty for the default.

    Yields:
        Variables for all ranks.

    Raises:
        UsageError: The file or the limit cannot be; nothing was done.
    """
    path = absolute_path(file)
    limit_bytes = parse_size_bytes(limit) if limit else DEFAULT_LIMIT_BYTES
    parts = path.with_name(f"{path.name}.parts")
    _check(path, parts, limit_bytes)
    has_run = False
    try:
        yield {"RONDE_TIMELINE": str(parts), "RONDE_TIMELINE_LIMIT": str(limit_bytes)}
        has_run = True
    finally:
        if has_run or parts.exists():
            _merge(path, parts, limit_bytes)


def _check(path: Path, parts: Path, limit_bytes: int) -> None:
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"--timeline must be a file in a directory that exists, got {str(path)!r}. "
            "Create the directory or name another."
        )
    if limit_bytes < 1 << 16:
        raise UsageError(
            f"--timeline-limit must be at least 64KiB, got {limit_bytes} bytes. "
            "Leave it out for 32MiB."
        )
    if parts.exists():
        raise UsageError(
            f"--timeline must be a name without parts of an earlier job, got {path}: "
            f"they are in {parts}. Type: ronde trace merge {path} {parts}, then "
            "remove that directory."
        )


def _merge(path: Path, parts: Path, limit_bytes: int) -> None:
    """Write the trace; a failure here must not hide how the job ended."""
    files = sorted(parts.glob(f"*{SUFFIX}"))
    if not files:
        _say("the timeline is empty: no rank called init(), so there is no file")
        return
    try:
        write_merged(path, [file.read_bytes() for file in files], limit_bytes)
        for file in files:
            file.unlink()
        parts.rmdir()
    except (UsageError, OSError) as error:
        _say(f"{error} The ranks' records are in {parts}.")


def _say(text: str) -> None:
    print(f"ronde: {text}", file=sys.stderr)
