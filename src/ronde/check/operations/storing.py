"""Writes into a folder to see how fast that is, and takes all of it away again."""

from ronde.check.facts import Value
from ronde.check.operations.site import Site
from ronde.check.paths import Errand, run_errands

CLEAR_S = 10.0
"""For a file system to take away what was written."""

_ARGUMENTS = ("path", "name", "num_bytes", "num_files", "patience_s")


def fill_folder(site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Write a file of ``num_bytes`` and ``num_files`` small ones into ``path``.

    They are in a folder of their own, ``name``. The process that makes it removes it;
    if that is killed, for ``deadline_s`` is over, or dies, another one does.

    Returns:
        What ``errands.fill`` tells, or why nothing is known. ``is_cleared`` says
        whether the folder is gone; if not, ``clear_folders`` of another host that
        shares it may do better.
    """
    errand = {"do": "fill", **{name: question[name] for name in _ARGUMENTS}}
    told = _run(errand, question["deadline_s"])
    if not told.get("is_cleared"):
        names = [question["name"]]
        cleared = clear_folders(site, {"path": question["path"], "names": names})
        told["is_cleared"] = "error" not in cleared
    return told


def clear_folders(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Take away the folders ``names`` in ``path`` with their files, whosever they are.

    The answer's ``found`` has those that were there.
    """
    errand = {"do": "clear", "path": question["path"], "names": question["names"]}
    return _run(errand, CLEAR_S)


def _run(errand: Errand, deadline_s: float) -> dict[str, Value]:
    [[told]] = run_errands([[errand]], deadline_s)
    return told
