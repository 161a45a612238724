"""How fast hosts compute and their GPUs copy, and whether all compute the same."""

from typing import Any

from ronde.check.families.cluster_pace import (
    PACE,
    PACE_CPU,
    SLOW,
    SLOW_CPU,
    find_slow,
)
from ronde.check.families.cluster_product import PRODUCTS
from ronde.check.families.gpu_copies import COPIES
from ronde.check.families.gpu_links import LOADED_LINKS
from ronde.check.steps.panel import Panel, Reply

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
        for fact, part in ((COPIES, "copies"), (LOADED_LINKS, "links")):
            _note_gpus(panel, host, fact, reply.values.get(part, {}) or _none(reply))


def _none(reply: Reply) -> dict[str, Any]:
    """Return why nothing is told of any GPU, in the form in which a GPU is told of."""
    products = reply.values.get("products", {})
    reasons = [each["failure"] for each in products.values() if "failure" in each]
    reason = "torch sees no GPU there"
    if any(name.startswith("cuda:") for name in products):
        reason = "the host's ronde does not tell of it; install this one's version"
    reason = reply.failure or next(iter(reasons), reason)
    return {"": {"failure": reason}}


def _note_gpus(panel: Panel, host: str, fact: str, told: dict[str, Any]) -> None:
    """Write down what GPUs tell; where all have failed, why, unless there are none."""
    failed = {gpu: each["failure"] for gpu, each in told.items() if _has_failed(each)}
    if len(failed) < len(told):
        panel.note(host, fact, told)
    elif "" not in failed or panel.facts[host].values.get("gpu.count"):
        gpu, reason = next(iter(failed.items()))
        panel.note_unread(host, fact, f"{gpu}: {reason}" if gpu else reason)


def _has_failed(told: dict[str, Any] | None) -> bool:
    return told is not None and "failure" in told
