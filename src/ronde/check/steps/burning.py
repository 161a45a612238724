"""How fast hosts compute and their GPUs copy for long, and whether all do the same."""

from typing import Any

from ronde.check.families.cluster_product import PRODUCTS
from ronde.check.gpu.copies import COPIES, LOADED_LINKS
from ronde.check.steps.base import Step
from ronde.check.steps.panel import Panel, Reply

SIZE = 2048
SEED = 2026

_NUM_GPUS = "gpu.count"
_TIMEOUT_S = 120.0


def run(panel: Panel) -> None:
    """Compute on all hosts at once, as long as the setting ``burn_s`` says."""
    seconds = float(panel.settings["burn_s"])
    question = {"do": "burn", "seconds": seconds, "size": SIZE, "seed": SEED}
    for host, reply in panel.ask_all(question, seconds + _TIMEOUT_S).items():
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
    elif "" not in failed or panel.facts[host].values.get(_NUM_GPUS):
        gpu, reason = next(iter(failed.items()))
        panel.note_unread(host, fact, f"{gpu}: {reason}" if gpu else reason)


def _has_failed(told: dict[str, Any] | None) -> bool:
    return told is not None and "failure" in told


STEP = Step(
    "burning",
    run,
    (PRODUCTS, COPIES, LOADED_LINKS),
    reads=(_NUM_GPUS,),
    setting="burn_s",
)
