"""Leaves a file in a directory, and looks for those of other hosts."""

from ronde.check.facts import Value
from ronde.check.operations.site import Site
from ronde.check.paths import Errand, run_errands

DEADLINE_S = 5.0
"""For a file system to answer."""


def leave_nonce(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Leave the file ``nonce`` in the directory ``path``."""
    errand = {"do": "leave", "path": question["path"], "name": question["nonce"]}
    return _run(errand, DEADLINE_S)


def find_nonces(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Look for the files ``nonces``, for ``patience_s`` at most.

    The answer's ``seen_s`` has the seconds until each that is there was seen.
    """
    patience_s: float = question["patience_s"]
    errand = {
        "do": "find",
        "path": question["path"],
        "names": question["nonces"],
        "patience_s": patience_s,
    }
    return _run(errand, patience_s + DEADLINE_S)


def remove_nonce(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Take away the files ``nonces``, whoever left them."""
    errand = {"do": "remove", "path": question["path"], "names": question["nonces"]}
    return _run(errand, DEADLINE_S)


def _run(errand: Errand, deadline_s: float) -> dict[str, Value]:
    [[told]] = run_errands([[errand]], deadline_s)
    return told
