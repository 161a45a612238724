"""``ronde topo log``: NCCL's debug log -> words."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ronde.cli.topo_input import TopoParser
from ronde.errors import UsageError
from ronde.plain_values import to_plain
from ronde.render.topo_log import tell_log
from ronde.topology.graph import Diagnostic, Level
from ronde.topology.nccl_log import NcclLog, judge_nccl_log, read_nccl_log

EXIT_FOUND = 1
"""Something of more weight than a note was found."""

FORM = "ronde-nccl-log"
VERSION = 1
"""Changes when a field changes its meaning or goes."""

_EPILOG = f"""\
Several files are one log. Lines of ranks that broke inside each other are put together
again. What gzip packed is unpacked. - is standard input.

To have all said, a file a rank:
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p \\
  NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING ronde run -n 8 train.py

exit code: 0 nothing but notes, {EXIT_FOUND} a warning or an error, 64 a file that \
cannot be read
"""


def run(words: Sequence[str]) -> int:
    """Read a log and say what NCCL chose and what looks wrong; return the exit code.

    Args:
        words: What stands after ``log``.

    Raises:
        UsageError: A file cannot be read, or NCCL said nothing in it.
    """
    options = _parser().read(words)
    if options is None:
        return 0
    log = _read(options.files)
    findings = judge_nccl_log(log)
    print(_to_json(log, findings) if options.json else tell_log(log, findings), end="")
    is_clean = all(finding.severity is Level.NOTE for finding in findings)
    return 0 if is_clean else EXIT_FOUND


def _parser() -> TopoParser:
    parser = TopoParser(
        "log",
        "Say in words what NCCL chose and what looks wrong, from what it "
        "wrote with NCCL_DEBUG=INFO.",
        _EPILOG,
    )
    add = parser.add_argument
    add(
        "files", nargs="+", metavar="FILE", help="what NCCL wrote; - for standard input"
    )
    add("--json", action="store_true", help="print one object of JSON")
    return parser


def _read(names: Sequence[str]) -> NcclLog:
    try:
        log = read_nccl_log(_open(names))
    except OSError as error:
        raise UsageError(
            f"{error.filename or names[0]} must be a file that can be read, got: "
            f"{error.strerror}. Check the name."
        ) from None
    if not log.num_messages:
        raise UsageError(
            f"{names[0]} must be what NCCL wrote, got {log.num_lines} lines without a "
            "word of it. Set NCCL_DEBUG=INFO for the job, and give its output."
        )
    return log


def _open(names: Sequence[str]) -> Iterator[BinaryIO]:
    """Yield the files, each open while it is read."""
    for name in names:
        if name == "-":
            yield sys.stdin.buffer
        else:
            with Path(name).open("rb") as file:
                yield file


def _to_json(log: NcclLog, findings: Sequence[Diagnostic]) -> str:
    value = {
        "form": FORM,
        "version": VERSION,
        "log": to_plain(log),
        "findings": [to_plain(finding) for finding in findings],
    }
    return json.dumps(value, indent=1) + "\n"
