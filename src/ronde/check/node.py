"""The program on each host, which reads questions and writes answers.

Questions and answers are JSON objects, one per line. ``do`` names the operation. An
answer with ``error`` reports a failure.
"""

import json
import sys
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any

from ronde.check.catalogue import OPERATIONS, PROBES
from ronde.check.check import IN_POD
from ronde.check.fleet import Value
from ronde.check.hosts import NodeContext
from ronde.check.probing import run_probes
from ronde.launch.environments import own_environment

_MODULES = {name: module for module, names in OPERATIONS.items() for name in names}


def main() -> None:
    """Answer questions until ``end``, or until standard input is closed."""
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
            entries = {each: PROBES[each] for each in question["names"]}
            outcomes = run_probes(entries, question["settings"])
            is_pod = "KUBERNETES_SERVICE_HOST" in own_environment()
            return {IN_POD: is_pod} | {n: o._asdict() for n, o in outcomes.items()}
        if name not in _MODULES:
            return {"error": f"there is no operation {name!r}"}
        operation = resolve_name(f"ronde.check.{_MODULES[name]}.{name}")
        return operation(context, question)
    except (OSError, ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
