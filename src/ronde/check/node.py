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
from ronde.check.hosts import NodeContext, Operation
from ronde.check.probing import run_probes

_MODULES = {
    "bench": "network.pair_jobs",
    "burn": "cluster.compute",
    "clear_folders": "storage.speed",
    "clock": "cluster.hosts",
    "count_errors": "network.rdma",
    "fill_folder": "storage.speed",
    "find_nonces": "storage.sharing",
    "hold_rendezvous": "network.pair_jobs",
    "leave_nonce": "storage.sharing",
    "listen": "network.visits",
    "offer_streams": "network.streams",
    "reach": "network.visits",
    "remove_nonce": "storage.sharing",
    "spin": "cluster.compute",
    "stream": "network.streams",
}
"""Where each operation is; the function has the operation's name."""


def main() -> None:
    """Answer until the question is ``end``, or nobody asks any more."""
    with ExitStack() as closing:
        context = NodeContext({}, closing)
        for line in sys.stdin:
            answer = _answer(context, line)
            if answer is None:
                return
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


def _answer(context: NodeContext, line: str) -> dict[str, Value] | None:
    try:
        question: Any = json.loads(line)
        name = question["do"]
        if name == "end":
            return None
        if name == "probe":
            return _probe(question)
        if name not in _MODULES:
            return {"error": f"there is no operation {name!r}"}
        operation: Operation = getattr(
            import_module(f"ronde.check.{_MODULES[name]}"), name
        )
        return operation(context, question)
    except (OSError, ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _probe(question: dict[str, Value]) -> dict[str, Value]:
    """Run the probes that are named; the answer has an object for each."""
    entries = {name: PROBES[name] for name in question["names"]}
    outcomes = run_probes(entries, question["settings"])
    return {name: outcome._asdict() for name, outcome in outcomes.items()}
