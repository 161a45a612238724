"""What a long matrix product says of processors: right everywhere, and as fast."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts
from ronde.check.families.device_speeds import (
    CPU,
    Device,
    Measure,
    find_slow,
    tell_devices,
)
from ronde.check.fleet import Fleet

PRODUCTS = "cluster.products"
"""Fact: by device, such as ``cpu`` or ``cuda:0``, what it made of the product."""

SLOW_SHARE = 0.8
VERY_SLOW_SHARE = 0.5
SLOW_GPU_SHARE = 0.9
VERY_SLOW_GPU_SHARE = 0.8
"""Nobody else uses a GPU: its speed is steadier than that of CPUs."""


def _judge_checksums(fleet: Fleet) -> Iterator[Finding]:
    """Tell which device's product differs from most, or from its own first one."""
    name = "product-checksum"
    devices: list[HostFacts] = []
    for facts in fleet.having(PRODUCTS):
        for device, told in facts.values[PRODUCTS].items():
            if "failure" in told:
                what = f"the product on {device} failed: {told['failure']}"
                yield Finding(name, Severity.FAIL, facts.host, what)
                continue
            label = f"{facts.host}\n{device}"
            devices.append(HostFacts(label, {name: told["checksum"]}, {}, {}))
            if told["num_wrong"]:
                yield Finding(
                    name,
                    Severity.FAIL,
                    facts.host,
                    f"{told['num_wrong']} of {told['num_products']} products on "
                    f"{device} differ from the first one",
                )
    for label, value, usual in Fleet(tuple(devices), {}).odd_ones(name):
        host, _, device = label.partition("\n")
        what = f"the product on {device} has checksum {value}"
        yield Finding(
            name, Severity.FAIL, host, what, usual.replace(" hosts", " devices")
        )


def _judge_speeds(fleet: Fleet) -> Iterator[Finding]:
    """Compare the CPUs of all hosts, and all GPUs of one model, wherever they are."""
    cpus: dict[Device, float] = {}
    gpus: dict[Device, float] = {}
    for facts in fleet.having(PRODUCTS):
        for name, told in facts.values[PRODUCTS].items():
            if "failure" not in told:
                device = Device(facts.host, name, told.get("model", name))
                of_kind = cpus if name == CPU else gpus
                of_kind[device] = float(told["gflop_per_s"])
    troubles = (*find_slow(cpus, _CPU_SPEED), *find_slow(gpus, _GPU_SPEED))
    yield from tell_devices("product-speed", troubles)


def _show(gflop_per_s: float) -> str:
    return f"{gflop_per_s:.3g} GFLOP/s"


_CPU_SPEED = Measure("computed at", _show, SLOW_SHARE, VERY_SLOW_SHARE)
_GPU_SPEED = Measure("computed at", _show, SLOW_GPU_SHARE, VERY_SLOW_GPU_SHARE)

CHECKS = (
    Check(
        id="product-checksum",
        family=Family.CLUSTER,
        title="all processors compute the same",
        reads="the checksum of a matrix product of seeded whole numbers in float64, "
        "on the CPUs and on each GPU, again and again for the time that --burn gives",
        threshold="the same bits everywhere and every time: all sums stay below 2^53 "
        "and are exact, in any order",
        source="IEEE 754; that silent errors are found by comparing hosts is the "
        "practice of large clusters",
        severity=Severity.FAIL,
        fix="Take the host out of the job, and have CPU, memory or GPU tested: "
        "dcgmi diag -r 3, memtester, stress-ng --verify",
        needs="--burn, torch",
        why="A processor that computes wrong in silence spoils the model of all ranks.",
        facts=(PRODUCTS,),
        judge=_judge_checksums,
    ),
    Check(
        id="product-speed",
        family=Family.CLUSTER,
        title="all processors compute as fast under load",
        reads="the speed of that product: CPUs of all hosts are compared, and GPUs of "
        "one model, of one host or of many",
        threshold=f"CPUs: {SLOW_SHARE:.0%} of what most hosts reach, below "
        f"{VERY_SLOW_SHARE:.0%} a failure; GPUs: {SLOW_GPU_SHARE:.0%} of what most of "
        f"the model reach, below {VERY_SLOW_GPU_SHARE:.0%} a failure",
        source="ronde's own",
        severity=Severity.FAIL,
        fix="Look at clocks, power cap and heat of that device while it computes",
        needs="--burn, torch; several hosts, or several GPUs of one model",
        why="Every collective waits for the slowest.",
        facts=(PRODUCTS,),
        judge=_judge_speeds,
    ),
)
