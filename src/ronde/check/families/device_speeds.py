"""Devices of hosts, such as GPUs: which are slower than others of their model."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ronde.check.check import Finding, Severity
from ronde.check.families.host_judges import Few, find_few
from ronde.topology.cpu_sets import format_list

CPU = "cpu"
_GPU = "cuda:"


class Device(NamedTuple):
    """One processor of one host.

    Attributes:
        host: Its host.
        name: ``cpu``, all of the host's together, or ``cuda:0`` and so on.
        model: Those of one model should be alike.
    """

    host: str
    name: str
    model: str


class Measure(NamedTuple):
    """What is measured of devices, and when one is slow.

    Attributes:
        did: What it did, with the preposition before the amount: ``computed at``.
        show: Writes an amount, with its unit.
        slow: Below this share of what most have it is a warning.
        very_slow: And below this one a failure.
    """

    did: str
    show: Callable[[float], str]
    slow: float
    very_slow: float


class DeviceTrouble(NamedTuple):
    """What is wrong with a device.

    Attributes:
        device: Which.
        severity: How bad.
        what: Half a sentence without its subject: ``computed at 3 GFLOP/s``.
        usual: What most others have.
        fix: What to do, where that is more exact than the check's own.
    """

    device: Device
    severity: Severity
    what: str
    usual: str = ""
    fix: str = ""


def find_slow(
    amounts: Mapping[Device, float], measure: Measure
) -> Iterator[DeviceTrouble]:
    """Yield the devices that have less of something than most of their model have.

    All hosts count alike. In a draw, and of two devices, nobody is blamed: all are
    told, with what the others have.
    """
    models: dict[str, dict[str, tuple[Device, float]]] = defaultdict(dict)
    for device, amount in amounts.items():
        models[device.model][f"{device.host}\n{device.name}"] = device, amount
    for alike in models.values():
        of_model = {label: amount for label, (_, amount) in alike.items()}
        few = find_few(of_model, measure.slow)
        fewest = find_few(of_model, measure.very_slow)
        for label in few.hosts:
            device, amount = alike[label]
            # In a draw no single device can be said to crawl.
            is_bad = label in fewest.hosts and not fewest.is_draw
            yield DeviceTrouble(
                device,
                Severity.FAIL if is_bad else Severity.WARN,
                f"{measure.did} {measure.show(amount)}",
                _tell_usual(label, of_model, few, measure.show),
            )


def _tell_usual(
    label: str,
    amounts: Mapping[str, float],
    few: Few,
    show: Callable[[float], str],
) -> str:
    if not few.is_draw:
        others = "hosts" if label.endswith(f"\n{CPU}") else "GPUs of this model"
        return f"{show(few.usual)} on most {others}"
    others = [amount for name, amount in amounts.items() if name != label]
    ends = dict.fromkeys(show(amount) for amount in (min(others), max(others)))
    return f"{' to '.join(ends)} elsewhere"


def tell_devices(check: str, troubles: Iterable[DeviceTrouble]) -> Iterator[Finding]:
    """Yield the findings; devices of a host whose trouble is alike share one."""
    same: dict[tuple[str, Severity, str, str], dict[str, list[str]]] = {}
    for each in troubles:
        key = each.device.host, each.severity, each.usual, each.fix
        same.setdefault(key, {}).setdefault(each.what, []).append(each.device.name)
    for (host, severity, usual, fix), whats in same.items():
        told = (f"{name_devices(names)} {what}" for what, names in whats.items())
        yield Finding(check, severity, host, "; ".join(told), usual, fix)


def name_devices(names: Iterable[str]) -> str:
    """Return names of devices as people read them: ``cpu, cuda:0-3,7``."""
    numbers: list[int] = []
    others: list[str] = []
    for name in names:
        number = name.removeprefix(_GPU)
        if number != name and number.isdecimal():
            numbers.append(int(number))
        else:
            others.append(name)
    gpus = [f"{_GPU}{format_list(numbers)}"] if numbers else []
    return ", ".join((*others, *gpus))
