"""Facts of each host by itself, by all probes."""

from ronde.check.catalogue import PROBES
from ronde.check.steps.panel import Panel

FAILED = "probe.failed"
"""Fact: by the name of each probe that gave none, why."""

_SLACK_S = 5.0


def run(panel: Panel) -> None:
    """Have all hosts run all probes; write down what they found."""
    question = {"do": "probe", "names": list(PROBES), "settings": panel.settings}
    longest_s = max(entry.deadline_s for entry in PROBES.values())
    replies = panel.ask_all(question, longest_s + _SLACK_S)
    for host, reply in replies.items():
        failed: dict[str, str] = {}
        for name in PROBES:
            told = reply.values.get(name, {"failure": reply.failure})
            if told["failure"]:
                failed[name] = told["failure"]
                panel.note_unread(host, PROBES[name].facts, told["failure"])
                continue
            facts = panel.facts[host]
            facts.values.update(told["values"])
            facts.unreadable.update(told["unreadable"])
            facts.seconds[name] = told["seconds"]
        panel.note(host, FAILED, failed)
