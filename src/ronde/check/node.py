"""The program on each host: one question a line comes in, one answer a line goes out.

Questions and answers are JSON objects. A question's ``do`` names the operation; an
answer has ``error`` where it could not be done.
"""

import json
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from ronde.check.catalogue import PROBES
from ronde.check.facts import Value
from ronde.check.operations.site import Operation, Site
from ronde.check.probing import run_probes

_MODULES = {
    "listen": "ronde.check.operations.reaching",
    "reach": "ronde.check.operations.reaching",
    "clock": "ronde.check.operations.clock",
    "count_errors": "ronde.check.operations.counting",
    "leave_nonce": "ronde.check.operations.sharing",
    "find_nonces": "ronde.check.operations.sharing",
    "remove_nonce": "ronde.check.operations.sharing",
    "fill_folder": "ronde.check.operations.storing",
    "clear_folders": "ronde.check.operations.storing",
    "burn": "ronde.check.operations.burning",
    "spin": "ronde.check.operations.burning",
    "offer_streams": "ronde.check.operations.bandwidth",
    "stream": "ronde.check.operations.bandwidth",
    "hold_rendezvous": "ronde.check.operations.benching",
    "bench": "ronde.check.operations.benching",
}
"""Where each operation is; the function has the operation's name."""


def main() -> None:
    """Answer until the question is ``end``, or nobody asks any more."""
    with ExitStack() as closing:
        site = Site({}, closing)
        for line in sys.stdin:
            answer = _answer(site, line)
            if answer is None:
                return
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _answer(site: Site, line: str) -> dict[str, Value] | None:
    try:
        question: Any = json.loads(line)
        name = question["do"]
        if name == "end":
            return None
        if name == "probe":
            return _probe(question)
        if name not in _MODULES:
            return {"error": f"there is no operation {name!r}"}
        operation: Operation = getattr(import_module(_MODULES[name]), name)
        return operation(site, question)
    except (OSError, ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _probe(question: dict[str, Value]) -> dict[str, Value]:
    """Run the probes that are named; the answer has an object for each."""
    entries = {name: PROBES[name] for name in question["names"]}
    outcomes = run_probes(entries, question["settings"])
    return {name: outcome._asdict() for name, outcome in outcomes.items()}
