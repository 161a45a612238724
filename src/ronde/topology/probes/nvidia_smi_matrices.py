"""The matrices that ``nvidia-smi topo -m`` and ``topo -p2p`` print, as text.

People paste them: tabs become blanks, columns grow together, the underlining of the
header stays as escape sequences, and lines around are of shells.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ronde.topology.probes.refusals import bad_value

GPU_NAME = re.compile(r"GPU([0-9]{1,3})")

_PATHS = r"NV[0-9]{1,3}|NODE|PIX|PXB|PHB|SYS|SOC"
_PEERS = r"OK|CNS|GNS|TNS|NS|DR|U"
_WORD = re.compile(rf"X|{_PATHS}|{_PEERS}")
_WORDS = re.compile(rf"(?:X|{_PATHS}|{_PEERS})+")
_NOT_TOLD = ("N/A", "-", "ERR!")
_RENAMED = {"SOC": "SYS"}
_SELF = "X"
_COLUMN = re.compile(r"[A-Za-z][\w.:+-]{0,63}")
_GROWN = re.compile(r"(?<=[0-9])(?=(?:GPU|NIC|mlx)[0-9])")
_HEADING = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S{1,64})\s*")


class Row(NamedTuple):
    """What a matrix says of one device.

    Attributes:
        line: Where it stands.
        words: How it reaches each column's device, in nvidia-smi's words of today;
            empty where not told.
        cpus: CPU affinity as written; empty where not told.
        nodes: NUMA affinity as written; empty where not told.
        memory_node: NUMA node of a GPU's own memory as written; empty where not told.
    """

    line: int
    words: tuple[str, ...]
    cpus: str = ""
    nodes: str = ""
    memory_node: str = ""


class Matrix(NamedTuple):
    """A matrix.

    Attributes:
        line: Where its header stands.
        columns: Their names in order, GPUs' as ``GPU0``, with their places from 0.
        rows: By name; network adapters' may be missing.
    """

    line: int
    columns: dict[str, int]
    rows: dict[str, Row]


def is_header(line: str) -> bool:
    """Return whether a line is the first of a matrix."""
    return bool(_columns(line))


def read_matrices(lines: Sequence[str], origin: str) -> Iterator[Matrix]:
    """Yield the matrices in lines of text.

    Raises:
        UsageError: A row does not fit its header, or a GPU has none.
    """
    matrix: Matrix | None = None
    headings: list[str] = []
    for number, line in enumerate(lines, 1):
        if matrix is not None and (name := _row_name(line, matrix)):
            row = _row(line, name, matrix, headings)
            matrix.rows[name] = _checked(
                row._replace(line=number), name, matrix, origin
            )
        elif columns := _columns(line):
            if matrix is not None:
                yield _complete(matrix, origin)
            headings = [match[0].split()[0] for match in _HEADING.finditer(line)]
            places = {name: place for place, name in enumerate(columns)}
            if len(places) != len(columns):
                raise bad_value(origin, number, "columns must be different", line)
            matrix = Matrix(number, places, {})
    if matrix is not None:
        yield _complete(matrix, origin)


def read_legend(lines: Sequence[str]) -> dict[str, str]:
    """Return what stands behind ``NIC0`` and the like."""
    matches = (_LEGEND.fullmatch(line) for line in lines if "NIC" in line)
    return {match[1]: match[2] for match in matches if match}


def _columns(line: str) -> tuple[str, ...]:
    """Return the columns of a header; empty for any other line."""
    if "GPU" not in line:
        return ()
    heading = _HEADING.search(line)
    columns = _GROWN.sub(" ", line[: heading.start() if heading else None]).split()
    if not columns or not GPU_NAME.fullmatch(columns[0]):
        return ()
    are_names = all(
        _COLUMN.fullmatch(name)
        and not _WORDS.fullmatch(name)
        and (heading or name[-1].isdecimal())
        for name in columns
    )
    return tuple(columns) if are_names else ()


def _row_name(line: str, matrix: Matrix) -> str:
    """Return the name of the row that a line is; empty if it is none."""
    words = line.split(maxsplit=2)
    if not words or words[0] not in matrix.columns or words[0] in matrix.rows:
        return ""
    # A second header begins like a row, and goes on otherwise.
    return "" if len(words) > 1 and words[1] in matrix.columns else words[0]


def _row(line: str, name: str, matrix: Matrix, headings: Sequence[str]) -> Row:
    """Return a row with as many words as could be read."""
    words: list[str] = []
    end = tail_at = line.index(name) + len(name)
    for match in re.finditer(r"\S+", line[end:]):
        if len(words) >= len(matrix.columns) or (more := _split(match[0])) is None:
            break
        words += more
        tail_at = end + match.end()
    else:
        tail_at = len(line)
    tail = line[tail_at:] if words else ""
    fields = dict(zip(headings, _fields(tail, len(headings)), strict=False))
    return Row(
        line=0,
        words=tuple(_RENAMED.get(word, word) for word in words),
        cpus=fields.get("CPU", ""),
        nodes=fields.get("NUMA", ""),
        memory_node=fields.get("GPU", ""),
    )


def _split(text: str) -> list[str] | None:
    """Return the words that stand in a piece without blanks; none if it has others."""
    if text in _NOT_TOLD:
        return [""]
    return _WORD.findall(text) if _WORDS.fullmatch(text) else None


def _fields(tail: str, num_headings: int) -> list[str]:
    """Return what stands behind the words, a field a heading, empty for ``N/A``.

    Only CPUs are left out where there are none; a lone list is not cut off its node.
    """
    fields = tail.split()
    is_list = num_headings == 2 and any(each in tail for each in "-,")
    if len(fields) == num_headings - 1 and not is_list:
        fields.insert(0, "")
    return ["" if field in _NOT_TOLD else field for field in fields]


def _checked(row: Row, name: str, matrix: Matrix, origin: str) -> Row:
    """Return a row that fits its header.

    Raises:
        UsageError: It does not.
    """
    wanted = len(matrix.columns)
    if len(row.words) != wanted or row.words[matrix.columns[name]] != _SELF:
        raise bad_value(
            origin,
            row.line,
            f"the row of {name} must have {wanted} columns as the header in line "
            f"{matrix.line}, with X in its own",
            " ".join(row.words),
        )
    return row


def _complete(matrix: Matrix, origin: str) -> Matrix:
    """Return a matrix with a row for every GPU.

    Raises:
        UsageError: One is missing.
    """
    missing = [
        name
        for name in matrix.columns
        if GPU_NAME.fullmatch(name) and name not in matrix.rows
    ]
    if missing:
        raise bad_value(
            origin,
            matrix.line,
            "a matrix must have a row for each GPU in its header",
            f"none for {', '.join(missing[:8])}",
        )
    return matrix
