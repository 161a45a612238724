"""Errors that links have counted by now."""

from ronde.check.facts import Value
from ronde.check.operations.site import Site
from ronde.check.probing import ProbeEntry, run_probes

DEADLINE_S = 15.0
"""What it may take."""

_PROBE = ProbeEntry(("ronde.check.probes.counters",), DEADLINE_S, "")


def count_errors(_site: Site, question: dict[str, Value]) -> dict[str, Value]:
    """Read counters, in a process of its own.

    Args:
        question: ``fact``, one of ``probes.counters``, and ``settings`` for the probe.

    Returns:
        ``counts``: the fact.
    """
    fact = question["fact"]
    settings = {**question["settings"], "fact": fact}
    outcome = run_probes({"counters": _PROBE}, settings)["counters"]
    if outcome.failure:
        return {"error": outcome.failure}
    return {"counts": outcome.values[fact]}
