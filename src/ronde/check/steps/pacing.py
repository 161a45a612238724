"""How fast hosts compute, by a little work."""

from ronde.check.families.cluster_pace import (
    PACE,
    PACE_CPU,
    SLOW,
    SLOW_CPU,
    find_slow,
)
from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel

SPIN_S = 0.2
MAX_ROUNDS = 5

_TIMEOUT_S = 10.0


def run(panel: Panel) -> None:
    """Write down the best of some rounds; a second one only where one seems slow.

    What is slow by chance is not so in all of them. All hosts take part in each round:
    those that share a machine share it alike.
    """
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    for _ in range(MAX_ROUNDS):
        replies = panel.ask_all({"do": "spin", "seconds": SPIN_S}, _TIMEOUT_S)
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


STEP = Step("pace", run, (PACE, PACE_CPU))
