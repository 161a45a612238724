"""Who reaches whom: every host listens, and then every host reaches every other."""

import random
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ronde.check.facts import Value
from ronde.check.hosts import HostSet, Reply, Step
from ronde.check.network.interfaces import ADDRESS
from ronde.check.operations.receiving import TOKEN_BYTES
from ronde.check.reachability import (
    BUSY,
    MTU,
    REACH,
    failing_pairs,
    lagging_pairs,
    lossy_pairs,
    own_mtu,
    slow_pairs,
)

MAX_ALL_PAIRS = 32
"""Of more hosts, each reaches its neighbours in a ring, and some at random."""

_NUM_SHIFTS = 4
_LISTEN_S = 4.0
_REACH_S = 12.0

Doors = Mapping[str, Reply]
"""By the host's name, what ``listen`` answers."""


def run(panel: HostSet) -> None:
    """Have the hosts reach each other; what looks bad gets a second try.

    One host alone tries the ports that the user named.

    With more than ``MAX_ALL_PAIRS`` hosts not all pairs are tried: each host reaches
    its neighbours in a ring and eight hosts at random, which reach it in turn.
    """
    wanted = panel.settings.get("ports", [])
    token = secrets.token_hex(TOKEN_BYTES // 2)
    opening = {"do": "listen", "token": token, "ports": wanted}
    if len(panel.names) < 2:
        if wanted:
            _note_busy(panel, panel.ask_all(opening, _LISTEN_S))
        return
    doors = panel.ask_all(opening, _LISTEN_S)
    _note_busy(panel, doors)
    for host, door in doors.items():
        panel.note(host, ADDRESS, panel.addresses[host])
        if door.failure:
            panel.note_unread(host, REACH, door.failure)
    plan = plan_partners([name for name in panel.names if not doors[name].failure])
    reached = _reach(panel, doors, plan, token)
    again = _pick(plan, _doubtful(reached))
    for host, others in _reach(panel, doors, again, token).items():
        for other, told in others.items():
            reached[host][other] = better(reached[host][other], told)
    if failing_pairs(reached):
        _note_heard(reached, panel.ask_all(opening, _LISTEN_S))
    for host, others in reached.items():
        panel.note(host, REACH, others)
        if mtu := own_mtu(others):
            panel.note(host, MTU, mtu)


def _note_busy(panel: HostSet, doors: Doors) -> None:
    for host, door in doors.items():
        if not door.failure:
            panel.note(host, BUSY, door.values["busy"])
        elif panel.settings.get("ports"):
            panel.note_unread(host, BUSY, door.failure)


def plan_partners(names: Sequence[str]) -> dict[str, list[str]]:
    """Return whom each host reaches, in an order in which few meet at one host.

    If one host reaches another, that one reaches it, too.
    """
    num = len(names)
    shifts = list(range(1, num))
    if num > MAX_ALL_PAIRS:
        chosen = random.Random(num).sample(range(2, (num + 1) // 2), _NUM_SHIFTS)  # noqa: S311
        shifts = sorted({s % num for each in (1, *chosen) for s in (each, -each)})
    return {
        name: [names[(place + shift) % num] for shift in shifts]
        for place, name in enumerate(names)
    }


def better(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be believed of two tries, the second because of the first.

    One success shows that it works; of two times the better one is the network's.
    """
    if second["error"] or (second["lost_bytes"] and not first["error"]):
        return first if not first["error"] else second
    joined = first | second
    for name, best in (("mb_per_s", max), ("mtu", max)):
        values = [each[name] for each in (first, second) if each.get(name)]
        if values:
            joined[name] = best(values)
    tails = [each for each in (first, second) if each.get("rtt_s")]
    if tails:
        calmest = min(tails, key=lambda each: each["p99_s"] / each["rtt_s"])
        joined |= {"rtt_s": calmest["rtt_s"], "p99_s": calmest["p99_s"]}
    return joined


def _doubtful(reached: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {
        *failing_pairs(reached),
        *lossy_pairs(reached),
        *lagging_pairs(reached),
        *slow_pairs(reached),
    }


def _pick(
    plan: Mapping[str, Sequence[str]], pairs: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    return {
        host: [other for other in others if (host, other) in pairs]
        for host, others in plan.items()
    }


def _reach(
    panel: HostSet, doors: Doors, plan: Mapping[str, Sequence[str]], token: str
) -> dict[str, dict[str, Any]]:
    """Return what hosts tell of those they are to reach; note who could not answer."""
    questions: dict[str, dict[str, Value]] = {}
    for host, others in plan.items():
        targets = [_target(panel, doors, other) for other in others]
        targets = [target for target in targets if target["address"]]
        if targets:
            asked = {"do": "reach", "name": host, "token": token, "targets": targets}
            questions[host] = asked
    reached: dict[str, dict[str, Any]] = {}
    for host, reply in panel.ask(questions, _REACH_S).items():
        if reply.failure:
            panel.note_unread(host, REACH, reply.failure)
        else:
            reached[host] = reply.values["reached"]
    return reached


def _target(panel: HostSet, doors: Doors, name: str) -> dict[str, Value]:
    values = doors[name].values
    return {
        "name": name,
        "address": panel.addresses[name],
        "ports": values["ports"],
        "udp_port": values["udp_port"],
    }


def _note_heard(reached: Mapping[str, Mapping[str, Any]], doors: Doors) -> None:
    for host, other in failing_pairs(reached):
        door = doors.get(other)
        if door and not door.failure:
            reached[host][other]["is_heard"] = host in door.values["heard"]


STEP = Step("reaching", run, (ADDRESS, BUSY, MTU, REACH))
