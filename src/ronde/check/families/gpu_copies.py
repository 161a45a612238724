"""How fast GPUs copy: from the host, to it, and within their memory."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import Value
from ronde.check.families.device_speeds import (
    Device,
    DeviceTrouble,
    Measure,
    find_slow,
    tell_devices,
)
from ronde.check.fleet import Fleet

COPIES = "cluster.gpu_copies"
"""Fact: by device, such as ``cuda:0``: its model and how fast it copies."""

SLOW_SHARE = 0.9
VERY_SLOW_SHARE = 0.8

_CHECK = "gpu-copy-speed"
_FLOORS_GB_PER_S = {
    "A100-SXM4-40GB": 21.0,
    "A100-SXM4-80GB": 21.0,
    "H100 80GB HBM3": 48.0,
    "H200": 48.0,
}
"""By the model's whole name: parts of a GPU and boards with other links have others."""


def _show(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


_WITH_HOST = {
    "host_to_device_gb_per_s": Measure(
        "copied from the host at", _show, SLOW_SHARE, VERY_SLOW_SHARE
    ),
    "device_to_host_gb_per_s": Measure(
        "copied to the host at", _show, SLOW_SHARE, VERY_SLOW_SHARE
    ),
}
_MEMORY = "device_memory_gb_per_s"
_WITHIN = Measure("copied within its memory at", _show, SLOW_SHARE, VERY_SLOW_SHARE)


def _judge_copies(fleet: Fleet) -> Iterator[Finding]:
    told: dict[Device, Value] = {}
    troubles: list[DeviceTrouble] = []
    for facts in fleet.having(COPIES):
        for name, copies in facts.values[COPIES].items():
            device = Device(facts.host, name, copies.get("model", ""))
            if "failure" in copies:
                what = f"could not be measured: {copies['failure']}"
                troubles.append(DeviceTrouble(device, Severity.INFORM, what))
            else:
                told[device] = copies
    for part, measure in _WITH_HOST.items():
        troubles += _judge_with_host(told, part, measure)
    within = {device: copies[_MEMORY] for device, copies in told.items()}
    yield from tell_devices(_CHECK, (*troubles, *find_slow(within, _WITHIN)))


def _judge_with_host(
    told: dict[Device, Value], part: str, measure: Measure
) -> Iterator[DeviceTrouble]:
    """Yield what is slow, and what is below its model's floor; the worse of the two."""
    rates = {device: float(copies[part]) for device, copies in told.items()}
    found = {trouble.device: trouble for trouble in find_slow(rates, measure)}
    for device, rate in rates.items():
        trouble = found.get(device)
        floor = _FLOORS_GB_PER_S.get(device.model.removeprefix("NVIDIA "), 0.0)
        if rate < floor and (trouble is None or trouble.severity is not Severity.FAIL):
            what = f"{measure.did} {measure.show(rate)}, below the {floor:g} of a sound"
            trouble = DeviceTrouble(device, Severity.FAIL, f"{what} {device.model}")
        if trouble is not None and not told[device]["is_near"]:
            what = f"{trouble.what} (its memory there may have been far)"
            trouble = trouble._replace(severity=Severity.WARN, what=what)
        if trouble is not None:
            yield trouble


CHECKS = (
    Check(
        id=_CHECK,
        family=Family.GPU,
        title="GPUs of one model copy as fast",
        reads="copies from pinned memory of the host, to it, and within the GPU's "
        "memory (read and written both count), the best of some rounds; one GPU after "
        "the other, from CPUs next to it, after the product of --burn",
        threshold=f"{SLOW_SHARE:.0%} of what most GPUs of the model reach, on all "
        f"hosts; below {VERY_SLOW_SHARE:.0%} a failure; with the host at least 21 GB/s "
        "on A100 SXM, 48 GB/s on H100 SXM and H200 SXM. A warning at most where no CPU "
        "next to the GPU could be chosen",
        source="the shares are ronde's own; 21 and 48 GB/s are what Azure's health "
        "checks of nodes ask for (ND A100 v4, ND H100 v5, ND H200 v5)",
        severity=Severity.FAIL,
        fix="Look at its PCI link (gpu-pcie-load) and clocks; seat it anew; for its "
        "own memory: dcgmi diag -r 3",
        needs="--burn, torch, GPUs; to compare, several of one model",
        why="Every step waits for the GPU whose data comes last.",
        facts=(COPIES,),
        judge=_judge_copies,
    ),
)
