"""How fast all hosts compute, and whether they all compute the same."""

from ronde.check.families.cluster_pace import (
    PACE,
    PACE_CPU,
    SLOW,
    SLOW_CPU,
    find_slow,
)
from ronde.check.families.cluster_product import PRODUCTS
from ronde.check.steps.panel import Panel

SPIN_S = 0.2
MAX_ROUNDS = 5
SIZE = 2048
SEED = 2026

_SPIN_TIMEOUT_S = 10.0
_BURN_TIMEOUT_S = 120.0


def run(panel: Panel) -> None:
    """Compute on all hosts at once: a little, and for long where that is asked for."""
    _measure_pace(panel)
    seconds = float(panel.settings.get("burn_s") or 0.0)
    if seconds > 0:
        _burn(panel, seconds)


def _measure_pace(panel: Panel) -> None:
    """Write down the best of some rounds; a second one only where one seems slow.

    What is slow by chance is not so in all of them. All hosts take part in each round:
    those that share a machine share it alike.
    """
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    for _ in range(MAX_ROUNDS):
        replies = panel.ask_all({"do": "spin", "seconds": SPIN_S}, _SPIN_TIMEOUT_S)
        for host, reply in replies.items():
            if reply.failure:
                panel.note_unread(host, PACE, reply.failure)
                continue
            walls[host] = min(reply.values["wall_s"], walls.get(host, float("inf")))
            cpus[host] = min(reply.values["cpu_s"], cpus.get(host, float("inf")))
        if not find_slow(walls, SLOW) and not find_slow(cpus, SLOW_CPU):
            break
    for host, wall_s in walls.items():
        panel.note(host, PACE, wall_s)
        panel.note(host, PACE_CPU, cpus[host])


def _burn(panel: Panel, seconds: float) -> None:
    question = {"do": "burn", "seconds": seconds, "size": SIZE, "seed": SEED}
    for host, reply in panel.ask_all(question, seconds + _BURN_TIMEOUT_S).items():
        if reply.failure:
            panel.note_unread(host, PRODUCTS, reply.failure)
        else:
            panel.note(host, PRODUCTS, reply.values["products"])
