"""How much goes through between each two hosts, where the user asks for it."""

import secrets
from collections.abc import Mapping, Sequence

from ronde.check.bandwidth import judge_pairs, rounds
from ronde.check.facts import Value
from ronde.check.operations.bandwidth import MEET_S, WARM_S
from ronde.check.steps.panel import Panel

RATES = "network.bandwidth"
"""Fact: by the name of each other host, what comes from it, in GB/s (1e9)."""

FAILURES = "network.bandwidth_failures"
"""Fact: by the name of each other host with which it could not be measured, why."""

SECONDS = 0.3
"""How long a pair is measured."""

MAX_ROUNDS = 32
"""More are not played: of many hosts, each meets only so many others."""

_OFFER_S = 5.0
_SLACK_S = 5.0


def run(panel: Panel) -> None:
    """Have the hosts meet in pairs, if ``settings`` has ``bandwidth``.

    All pairs of a round are measured at the same time, as a job would load the network.
    Who is slow is measured once more: a busy moment is no slow link.
    """
    if not panel.settings.get("bandwidth") or len(panel.names) < 2:
        return
    for name in panel.names:
        panel.note(name, RATES, {})
        panel.note(name, FAILURES, {})
    ports = _open(panel)
    schedule = list(rounds(list(ports)))
    # What is left out is spread over the schedule.
    stride = max(1, -(-len(schedule) // MAX_ROUNDS))
    played = schedule[::stride]
    for pairs in played:
        _play(panel, pairs, ports)
    suspected = _suspected(panel)
    for pairs in played:
        _play(panel, [pair for pair in pairs if {*pair} in suspected], ports)
    _tell_unmet(panel)


def _suspected(panel: Panel) -> list[set[str]]:
    rates = {name: facts.values[RATES] for name, facts in panel.facts.items()}
    slow, links = judge_pairs(rates)
    return [
        *({each.host, partner} for each in slow for partner in each.partners),
        *({each.host, each.other} for each in links),
    ]


def _tell_unmet(panel: Panel) -> None:
    for name, facts in panel.facts.items():
        if not facts.values[RATES]:
            del facts.values[RATES]
            reasons = [*facts.values[FAILURES].values(), "no other host was met"]
            panel.note_unread(name, RATES, facts.unreadable.get(RATES, reasons[0]))


def _open(panel: Panel) -> dict[str, int]:
    """Return the ports on which hosts wait for streams, by the host's name."""
    questions: dict[str, dict[str, Value]] = {}
    for name, address in panel.addresses.items():
        if address:
            questions[name] = {"do": "offer_streams", "address": address}
        else:
            panel.note_unread(name, RATES, "no other host has a route to it")
    ports: dict[str, int] = {}
    for name, reply in panel.ask(questions, _OFFER_S).items():
        if reply.failure:
            panel.note_unread(name, RATES, reply.failure)
        else:
            ports[name] = reply.values["port"]
    return ports


def _play(
    panel: Panel, pairs: Sequence[tuple[str, str]], ports: Mapping[str, int]
) -> None:
    """Measure disjoint pairs; the better of two measurements stays."""
    questions: dict[str, dict[str, Value]] = {}
    for caller, called in pairs:
        common = {"do": "stream", "token": secrets.token_hex(16), "seconds": SECONDS}
        place = {"address": panel.addresses[called], "port": ports[called]}
        questions |= {caller: common | place, called: common}
    replies = panel.ask(questions, 2 * (MEET_S + WARM_S + SECONDS) + _SLACK_S)
    for pair in pairs:
        failure = next((r.failure for h in pair if (r := replies[h]).failure), "")
        for one, other in (pair, pair[::-1]):
            known = panel.facts[one].values
            if failure:
                known[FAILURES][other] = failure
                continue
            rate = replies[one].values["gb_per_s"]
            known[RATES][other] = max(rate, known[RATES].get(other, 0.0))
