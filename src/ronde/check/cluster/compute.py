"""How fast hosts compute: a little work always, a long matrix product with --burn."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from ronde.check.check import FAIL, WARN, Family, Problem, Problems, check
from ronde.check.facts import Fleet, Value, find_few, find_odd, show_usual
from ronde.check.gpu.copies import COPIES, LOADED_LINKS
from ronde.check.gpu.judges import (
    CPU,
    CheckedDevice,
    SpeedMeasure,
    find_slow_devices,
    fold_devices,
)
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply

# Fact: seconds for a fixed piece of work, while all hosts do it.
PACE = "cluster.compute_s"
# Fact: seconds of CPU for the same work, the best of many on several CPUs.
PACE_CPU = "cluster.compute_cpu_s"
# Fact: by device, such as ``cpu`` or ``cuda:0``, what it made of the product.
PRODUCTS = "cluster.products"
_SLOW, _VERY_SLOW, _SLOW_CPU = 2.0, 4.0, 1.5
_SPIN_S = 0.2
_MAX_ROUNDS = 5
_SIZE, _SEED = 2048, 2026

_MAX_SPIN_S, _SPIN_TIMEOUT_S, _BURN_TIMEOUT_S = 5.0, 10.0, 120.0
_BASE, _EXPONENT, _MODULUS = 3, (1 << 512) - 1, (1 << 521) - 1
"""Half a millisecond or so, in the interpreter's own arithmetic: no library of which a
host may have another one, and no instructions that some processors lack."""

_MAX_CPUS = 8
# On each CPU of a tour: the first ones find cold caches and a slow clock.
_NUM_PIECES = 8
# For torch to be imported, drivers to start, and each GPU to copy.
_BESIDES_S = 110.0
_KILLED_S = 1.0
_MAX_CHARS = 200
_NUM_GPUS = "gpu.count"
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from ronde.check.cluster.product import main; main()"
)


def spin(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Compute the same again and again for ``seconds``, where the system puts it.

    The answer has ``wall_s`` for one piece of work, waiting included: what a host that
    must share its CPUs, or is limited, has more of; and ``cpu_s`` of the quickest one,
    on any of some CPUs that are spread over the host: what a slower processor has more
    of. A busy neighbour on the same core slows one CPU, and no other.
    """
    seconds = min(float(question["seconds"]), _MAX_SPIN_S)
    begun_s = now_s = time.monotonic()
    num_pieces, best_s = 0, float("inf")
    while num_pieces == 0 or now_s < begun_s + seconds:
        best_s = min(best_s, _compute_piece())
        num_pieces += 1
        now_s = time.monotonic()
    wall_s = (now_s - begun_s) / num_pieces
    return {"wall_s": wall_s, "cpu_s": min(best_s, _tour_cpus())}


def _compute_piece() -> float:
    """Return the seconds of CPU that one piece of work takes now and here."""
    cpu_s = time.thread_time()
    pow(_BASE, _EXPONENT, _MODULUS)
    return time.thread_time() - cpu_s


def _tour_cpus() -> float:
    """Return the least seconds of CPU for a piece of work on some of the CPUs.

    It is infinite where no CPU may be chosen, as in some containers.
    """
    allowed = sorted(os.sched_getaffinity(0))
    best_s = float("inf")
    try:
        for cpu in allowed[:: -(-len(allowed) // _MAX_CPUS)]:
            os.sched_setaffinity(0, {cpu})
            best_s = min(best_s, *(_compute_piece() for _ in range(_NUM_PIECES)))
    except PermissionError:
        return best_s
    finally:
        with suppress(PermissionError):
            os.sched_setaffinity(0, allowed)
    return best_s


def burn(_: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Multiply two seeded matrices of ``size`` for ``seconds``, on all processors.

    Then each GPU copies, one after the other. The answer has ``products``: by device;
    see ``product.multiply``. Of a device that failed, and of all where all hung,
    ``failure`` alone. ``copies`` and ``links``: by GPU; see ``copies.measure_gpu``.

    Raises:
        OSError: There is no torch.
    """
    seconds = float(question["seconds"])
    given = json.dumps([seconds, int(question["size"]), int(question["seed"])])
    words = [sys.executable, "-c", _BOOT, _PACKAGE_DIR, given]
    output, failure = _run(words, seconds)
    found = _merge(output)
    if "missing" in found:
        raise OSError(found["missing"])
    if "products" not in found:
        found["products"] = {"all processors": {"failure": failure}}
    gpus = [name for name in found["products"] if name.startswith("cuda:")]
    not_reached = {name: {"failure": f"its program {failure}"} for name in gpus}
    for part in ("copies", "links"):
        found[part] = not_reached | found.get(part, {})
    return found


def _run(words: list[str], seconds: float) -> tuple[bytes, str]:
    """Run a program; return what it wrote, and how it ended, in half a sentence.

    One that takes much longer than it should is killed.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, complaint = process.communicate(timeout=seconds + _BESIDES_S)
    except subprocess.TimeoutExpired as late:
        os.killpg(process.pid, signal.SIGKILL)
        # What hangs in a driver dies when that lets go of it.
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED_S)
        how = f"hung, and was killed {_BESIDES_S:g} s after its time"
        return late.output or b"", how
    last = complaint.decode(errors="replace").strip().splitlines()[-1:]
    reason = f"ended with code {process.returncode}: {''.join(last)}"
    return output, reason[:_MAX_CHARS]


def _merge(output: bytes) -> dict[str, Any]:
    """Return the lines of a program together, those that are JSON objects."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            # Libraries write there as well.
            continue
        if not isinstance(answer, dict):
            continue
        for name, value in cast("dict[str, Any]", answer).items():
            if isinstance(value, dict):
                found.setdefault(name, {}).update(value)
            else:
                found[name] = value
    return found


def measure_pace(hosts: HostSet) -> None:
    """Store the best of some rounds; a second one only where one seems slow.

    What is slow by chance is not so in all of them. All hosts take part in each round:
    those that share a machine share it alike.
    """
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    for _ in range(_MAX_ROUNDS):
        replies = hosts.ask_all({"do": "spin", "seconds": _SPIN_S}, _SPIN_TIMEOUT_S)
        for host, reply in replies.items():
            if reply.failure:
                hosts.note_unread(host, PACE, reply.failure)
                continue
            walls[host] = min(reply.values["wall_s"], walls.get(host, float("inf")))
            cpus[host] = min(reply.values["cpu_s"], cpus.get(host, float("inf")))
        if not find_slow(walls, _SLOW) and not find_slow(cpus, _SLOW_CPU):
            break
    for host, wall_s in walls.items():
        hosts.note(host, PACE, wall_s)
        hosts.note(host, PACE_CPU, cpus[host])


PACE_STEP = ProbeStep("pace", measure_pace, (PACE, PACE_CPU))


def run_burn(hosts: HostSet) -> None:
    """Compute on all hosts at once, for the seconds of the setting ``burn_s``."""
    seconds = float(hosts.settings["burn_s"])
    question = {"do": "burn", "seconds": seconds, "size": _SIZE, "seed": _SEED}
    for host, reply in hosts.ask_all(question, seconds + _BURN_TIMEOUT_S).items():
        if reply.failure:
            hosts.note_unread(host, PRODUCTS, reply.failure)
        else:
            hosts.note(host, PRODUCTS, reply.values["products"])
        for fact, part in ((COPIES, "copies"), (LOADED_LINKS, "links")):
            found = reply.values.get(part, {}) or _why_no_gpu(reply)
            _note_gpus(hosts, host, fact, found)


def _why_no_gpu(reply: Reply) -> dict[str, Any]:
    """Return why nothing is known of any GPU, in the form in which GPUs are."""
    products = reply.values.get("products", {})
    reasons = [each["failure"] for each in products.values() if "failure" in each]
    reason = "torch sees no GPU there"
    if any(name.startswith("cuda:") for name in products):
        reason = "the host's ronde does not measure it; install this one's version"
    reason = reply.failure or next(iter(reasons), reason)
    return {"": {"failure": reason}}


def _note_gpus(hosts: HostSet, host: str, fact: str, found: dict[str, Any]) -> None:
    """Store what is known of GPUs; where all failed, why, unless there are none."""
    failed = {g: e["failure"] for g, e in found.items() if e and "failure" in e}
    if len(failed) < len(found):
        hosts.note(host, fact, found)
    elif "" not in failed or hosts.facts[host].values.get(_NUM_GPUS):
        gpu, reason = next(iter(failed.items()))
        hosts.note_unread(host, fact, f"{gpu}: {reason}" if gpu else reason)


BURN_STEP = ProbeStep(
    "burning",
    run_burn,
    (PRODUCTS, COPIES, LOADED_LINKS),
    reads=(_NUM_GPUS,),
    setting="burn_s",
)


def _speeds(paces: Mapping[str, float]) -> dict[str, float]:
    return {host: 1 / max(pace, 1e-9) for host, pace in paces.items()}


def find_slow(paces: Mapping[str, float], limit: float) -> tuple[str, ...]:
    """Return the hosts that need more than so many times what most need.

    In a draw, and with only two hosts, that is all of them; see ``find_few``.
    """
    return find_few(_speeds(paces), 1 / limit).hosts


@check(Family.CLUSTER, FAIL, PACE, PACE_CPU)
def slow_host(fleet: Fleet) -> Problems:
    """All hosts compute as fast.

    reads: the time of a fixed computation on one CPU, done on all hosts at once and up
        to five times, and its CPU time on the quickest of up to eight CPUs
    threshold: twice what most hosts need, four times a failure; 1.5 times the CPU time
    source: ronde's own: hosts that share two busy CPUs stay below twice
    fix: Look at who else uses its CPUs and who limits it: top, taskset -p $$, nice,
        cpu.max of its control group
    needs: several hosts
    why: Every collective waits for the slowest host.
    """
    facts = {each.host: each.values for each in fleet.having(PACE, PACE_CPU)}
    walls = {host: float(values[PACE]) for host, values in facts.items()}
    cpus = {host: float(values[PACE_CPU]) for host, values in facts.items()}
    slow_cpus, speeds = find_slow(cpus, _SLOW_CPU), _speeds(walls)
    few, fewest = find_few(speeds, 1 / _SLOW), find_few(speeds, 1 / _VERY_SLOW)

    def show(speed: float) -> str:
        return f"{1000 / speed:.2g} ms"

    for host, wall in walls.items():
        if host not in few.hosts and host not in slow_cpus:
            continue
        share = min(1.0, cpus[host] / max(wall, 1e-9))
        # In a draw no single host can be said to crawl.
        is_bad = host in fewest.hosts and not fewest.is_draw
        fix = "Its CPU is clocked down or another model: look at governor, power cap "
        yield Problem(
            f"{show(speeds[host])} for a piece of work, with {share:.0%} of a CPU",
            FAIL if is_bad else WARN,
            show_usual(host, speeds, few, show),
            f"{fix}and heat" if host in slow_cpus else "",
            host,
        )


@check(Family.CLUSTER, FAIL, PRODUCTS)
def product_checksum(fleet: Fleet) -> Problems:
    """All processors compute the same.

    reads: the checksum of a matrix product of seeded whole numbers in float64, on the
        CPUs and on each GPU, again and again for the time that --burn gives
    threshold: the same bits everywhere and every time: all sums stay below 2^53 and are
        exact, in any order
    source: IEEE 754; that silent errors are found by comparing hosts is the practice of
        large clusters
    fix: Take the host out of the job, and have CPU, memory or GPU tested: dcgmi diag -r
        3, memtester, stress-ng --verify
    needs: --burn, torch
    why: A processor that silently computes wrong results spoils the model of all ranks.
    """
    checksums: dict[str, str] = {}
    for host, products in fleet.known(PRODUCTS).items():
        for device, each in products.items():
            if "failure" in each:
                what = f"the product on {device} failed: {each['failure']}"
                yield Problem(what, host=host)
                continue
            checksums[f"{host}\n{device}"] = each["checksum"]
            if each["num_wrong"]:
                what = f"{each['num_wrong']} of {each['num_products']} products on "
                yield Problem(f"{what}{device} differ from the first one", host=host)
    for label, value, usual in find_odd(checksums, of="devices"):
        host, _, device = label.partition("\n")
        what = f"the product on {device} has checksum {value}"
        yield Problem(what, usual=usual, host=host)


def _show_flops(gflop_per_s: float) -> str:
    return f"{gflop_per_s:.3g} GFLOP/s"


_CPU_SPEED = SpeedMeasure("computed at", _show_flops, 0.8, 0.5)
# Nobody else uses a GPU: its speed is steadier than that of CPUs.
_GPU_SPEED = SpeedMeasure("computed at", _show_flops, 0.9, 0.8)


@check(Family.CLUSTER, FAIL, PRODUCTS)
def product_speed(fleet: Fleet) -> Problems:
    """All processors compute as fast under load.

    reads: the speed of that product: CPUs of all hosts are compared, and GPUs of one
        model, of one host or of many
    threshold: CPUs: 80% of what most hosts reach, below 50% a failure; GPUs: 90% of
        what most of the model reach, below 80% a failure
    source: ronde's own
    fix: Look at clocks, power cap and heat of that device while it computes
    needs: --burn, torch; several hosts, or several GPUs of one model
    why: Every collective waits for the slowest.
    """
    cpus: dict[CheckedDevice, float] = {}
    gpus: dict[CheckedDevice, float] = {}
    for host, products in fleet.known(PRODUCTS).items():
        for name, each in products.items():
            if "failure" not in each:
                device = CheckedDevice(host, name, each.get("model", name))
                (cpus if name == CPU else gpus)[device] = float(each["gflop_per_s"])
    slow = find_slow_devices(cpus, _CPU_SPEED) | find_slow_devices(gpus, _GPU_SPEED)
    return fold_devices(slow.items())
