"""Facts of each host by itself, by probes."""

from collections.abc import Sequence

from ronde.check.catalogue import PROBES
from ronde.check.cluster.hosts import FAILED
from ronde.check.hosts import HostSet

_SLACK_S = 5.0


def run(panel: HostSet, names: Sequence[str]) -> None:
    """Have all hosts run the probes of some names; write down what they found."""
    question = {"do": "probe", "names": list(names), "settings": panel.settings}
    longest_s = max(PROBES[name].deadline_s for name in names)
    replies = panel.ask_all(question, longest_s + _SLACK_S)
    for host, reply in replies.items():
        failed: dict[str, str] = {}
        for name in names:
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
