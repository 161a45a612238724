"""Errors that links have counted since the probes ran: behind all that loads them."""

from collections.abc import Callable, Iterable, Mapping

from ronde.check.facts import Value
from ronde.check.families.link_errors import RDMA_GROWTH
from ronde.check.operations.counting import DEADLINE_S
from ronde.check.probes.counters import RDMA_ERRORS
from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel

_SLACK_S = 5.0


def _count_ports(panel: Panel) -> None:
    counting = [h for h, each in panel.facts.items() if each.values.get(RDMA_ERRORS)]
    _count(panel, counting, RDMA_ERRORS, RDMA_GROWTH, compare_ports)


def _count(
    panel: Panel,
    hosts: Iterable[str],
    fact: str,
    grown: str,
    compare: Callable[[Value, Value], Value],
) -> None:
    """Read a fact of hosts a second time, and write down by how much it has grown."""
    question = {"do": "count_errors", "fact": fact, "settings": panel.settings}
    questions = dict.fromkeys(hosts, question)
    replies = panel.ask(questions, DEADLINE_S + _SLACK_S) if questions else {}
    for host, reply in replies.items():
        if reply.failure:
            panel.note_unread(host, grown, reply.failure)
        else:
            before = panel.facts[host].values[fact]
            panel.note(host, grown, compare(before, reply.values["counts"]))


def compare_ports(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Return by port and counter what has come; nothing of what was reset meanwhile."""
    grown = {
        port: {
            counter: count - before[port][counter]
            for counter, count in counts.items()
            if count > before.get(port, {}).get(counter, count)
        }
        for port, counts in after.items()
    }
    return {port: counts for port, counts in grown.items() if counts}


PORTS_STEP = Step("counting RDMA errors", _count_ports, (RDMA_GROWTH,), (RDMA_ERRORS,))
