"""What GPUs of one host copy to each other: ``--bandwidth`` measures it."""

import os
import signal
from collections import defaultdict
from functools import partial
from importlib import import_module
from itertools import combinations
from statistics import median
from typing import Any

from ronde.check.burn import Rounds, quickest_s
from ronde.check.check import FAIL, WARN, Problem, Problems, check
from ronde.check.fleet import Fleet, Value
from ronde.check.hosts import HostSet, NodeContext, ProbeStep
from ronde.check.probing import FactReader, run_probe
from ronde.processes import die_with_parent
from ronde.units import list_first

# Fact: by pair, such as ``0-1``: GB/s (1e9) of the slower direction; 0 where what
# arrived is not what was sent.
PAIRS = "gpu.pairs"
_COUNT, _BUILD, _NVLINKS = "gpu.count", "versions.torch_build", "gpu.nvlinks"
_NUM_BYTES = 256 << 20
_LIMIT_S, _SLACK_S = 120.0, 5.0  # for torch's import, and each pair for half a second
_SLOW, _VERY_SLOW = 0.9, 0.7
_MAX_CHARS = 200
_ROUNDS = Rounds()
Torch = Any
Tensor = Any


def copy_pairs(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Copy between any two GPUs of this host; the answer has ``pairs``."""
    copied = run_probe(__name__, float(question["seconds"]), question)
    if failure := copied.failure or copied.unreadable.get("pairs", ""):
        raise OSError(failure)
    return copied.values


def read(reader: FactReader) -> None:
    """Be the program that copies."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    with reader.reading("pairs"):
        try:
            torch: Torch = import_module("torch")
            reader.values["pairs"] = measure_pairs(torch, torch.cuda.device_count())
        except (ImportError, RuntimeError) as error:
            # CUDA's errors go on with advice for programmers.
            reason = str(error).partition("\n")[0][:_MAX_CHARS]
            reader.unreadable["pairs"] = f"torch failed: {reason}"


def measure_pairs(
    torch: Torch, num_gpus: int, rounds: Rounds = _ROUNDS
) -> dict[str, float]:
    """Return by pair what goes through, one pair after the other."""
    found: dict[str, float] = {}
    zeros = partial(torch.zeros, _NUM_BYTES, dtype=torch.uint8)
    for one, other in combinations(range(num_gpus), 2):
        a, b = zeros(device=f"cuda:{one}"), zeros(device=f"cuda:{other}")
        there = _rate(torch, a.fill_(1), b, rounds)
        found[f"{one}-{other}"] = min(there, _rate(torch, b.fill_(2), a, rounds))
        del a, b
        torch.cuda.empty_cache()
    return found


def _rate(torch: Torch, source: Tensor, target: Tensor, rounds: Rounds) -> float:
    """Return GB/s of the best copy; 0 where something else arrives."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        for tensor in (source, target):
            torch.cuda.synchronize(tensor.device)

    seconds = quickest_s(copy, rounds)
    is_right = bool((target == source.flatten()[0].item()).all())
    return round(is_right * source.nbytes / seconds / 1e9, 3)


def run(hosts: HostSet) -> None:
    """Have each host copy between its GPUs; of several hosts, their links come next."""
    able = {
        name: {"do": "copy_pairs", "seconds": _LIMIT_S}
        for name, facts in hosts.facts.items()
        if int(facts.values.get(_COUNT) or 0) > 1
        and str(facts.values.get(_BUILD)).startswith(("CUDA", "HIP"))
    }
    for name, reply in hosts.ask(able, _LIMIT_S + _SLACK_S).items():
        if reply.failure:
            hosts.note_unread(name, PAIRS, reply.failure)
        else:
            hosts.note(name, PAIRS, reply.values["pairs"])
    if len(hosts.names) == 1 and not able:
        reason = "it has no two GPUs that torch can use, so there is nothing to pair: "
        hosts.note_unread(hosts.names[0], PAIRS, f"{reason}name more hosts with -H")


STEP = ProbeStep("GPU pairs", run, (PAIRS,), (_COUNT, _BUILD), setting="bandwidth")


@check(FAIL, PAIRS, besides=(_NVLINKS,))
def gpu_pair_speed(fleet: Fleet) -> Problems:
    """Any two GPUs of a host copy to each other as fast, and rightly.

    reads: copies of 256 MiB both ways between each two GPUs, one pair at a time
    threshold: what arrives is what was sent; with NVLinks at least 90 % of the median
        of the host's pairs (a warning), below 70 % a failure; without, a warning
    source: ronde's own: 10 % for what is more than the noise of short copies, 30 % for
        what slows a job as much
    fix: nvidia-smi topo -m; nvidia-smi nvlink -e; without NVLinks: ACS and the slots
    needs: --bandwidth, torch, two GPUs
    why: A ring goes through all GPUs: the slowest pair sets the pace of every step.
    """
    for facts in fleet.having(PAIRS):
        pairs: dict[str, float] = facts.values[PAIRS]
        wrong = [pair for pair, rate in pairs.items() if not rate]
        if wrong:
            message = f"GPUs {list_first(wrong)}: what arrives is not what was sent"
            fix = "switch ACS and the IOMMU's translation off, else reset the GPUs"
            yield Problem(message, fix=fix, host=facts.host)
        usual = median(pairs.values()) if pairs else 0.0
        links = facts.values.get(_NVLINKS) or ()
        has_nvlinks = bool(links) and all(any(each or ()) for each in links)
        slow: dict[bool, list[str]] = defaultdict(list)
        for pair, rate in pairs.items():
            # Without NVLinks those of two sockets are slower by their nature.
            limit = _SLOW if has_nvlinks else _VERY_SLOW
            if 0 < rate < limit * usual:
                is_bad = has_nvlinks and rate < _VERY_SLOW * usual
                slow[is_bad].append(f"{pair} ({rate:.3g} GB/s)")
        median_text = f"{usual:.3g} GB/s is the median of its pairs"
        for is_bad, names in slow.items():
            severity, message = FAIL if is_bad else WARN, f"GPUs {list_first(names)}"
            yield Problem(message, severity, median_text, host=facts.host)
