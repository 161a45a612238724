"""Judges of what each GPU answers; GPUs of a host with one problem share a finding."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ronde.check.check import (
    Check,
    Family,
    Fleet,
    Problem,
    Problems,
    Severity,
    Value,
    find_few,
    make_check,
)
from ronde.topology.cpu_sets import format_list

CPU = "cpu"
_CUDA = "cuda:"


def fold_gpus(host: str, problems: Iterable[Problem | None]) -> Problems:
    """Yield the problems of a host's GPUs; None stands for a sound one."""
    alike: dict[Problem, list[int]] = defaultdict(list)
    for number, problem in enumerate(problems):
        if problem is not None:
            alike[problem].append(number)
    for problem, numbers in alike.items():
        gpus = f"GPU{'s' * (len(numbers) > 1)} {format_list(numbers)}"
        yield problem._replace(what=f"{gpus}: {problem.what}", host=host)


def each_gpu(
    severity: Severity, *facts: str
) -> Callable[[Callable[..., Problems]], Check]:
    """Make a judge of a GPU's answers a check; its first problem counts."""

    def make(judge: Callable[..., Problems]) -> Check:
        def judge_all(fleet: Fleet) -> Problems:
            for host in fleet.having(*facts):
                answers = zip(*(host.values[f] or () for f in facts), strict=True)
                known = (
                    each if each.count(None) < len(each) else () for each in answers
                )
                found = (next(judge(*each), None) if each else None for each in known)
                yield from fold_gpus(host.host, found)

        return make_check(judge, judge_all, Family.GPU, severity, facts)

    return make


def odd_gpus(
    fleet: Fleet, fact: str, show: Callable[[Value], str], severity: Severity
) -> Problems:
    """Yield GPUs that differ from over half of their model, as ``show`` writes them."""
    shown: dict[str, list[tuple[str, str]]] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for facts in fleet.having(fact, "gpu.titles"):
        pairs = zip(facts.values["gpu.titles"], facts.values[fact], strict=True)
        shown[facts.host] = [(str(t), "" if a is None else show(a)) for t, a in pairs]
        for title, value in shown[facts.host]:
            counts[title].update([value] if value else [])
    usual: dict[str, str] = {}
    for title, counter in counts.items():
        value, most = max(counter.items(), key=lambda item: item[1], default=("", 0))
        usual[title] = value if 2 * most > counter.total() else ""
    for host, gpus in shown.items():
        found = (
            Problem(value, severity, f"{usual[title]} on most GPUs of this model")
            if value and usual[title] and value != usual[title]
            else None
            for title, value in gpus
        )
        yield from fold_gpus(host, found)


class CheckedDevice(NamedTuple):
    """One processor of one host; those of one model should be alike."""

    host: str
    # ``cpu``, all of the host's together, or ``cuda:0`` and so on.
    name: str
    model: str


class SpeedMeasure(NamedTuple):
    """What is measured of devices, and when one is slow."""

    # With the preposition before the amount: ``computed at``.
    action: str
    show: Callable[[float], str]
    # Below these shares of what most have: a warning, a failure.
    slow: float
    very_slow: float


def find_slow_devices(
    amounts: Mapping[CheckedDevice, float], measure: SpeedMeasure
) -> dict[CheckedDevice, Problem]:
    """Return the devices slower than most of their model; in a draw all."""
    found: dict[CheckedDevice, Problem] = {}
    models: dict[str, dict[str, CheckedDevice]] = defaultdict(dict)
    for device in amounts:
        models[device.model][f"{device.host}\n{device.name}"] = device
    for alike in models.values():
        of_model = {label: amounts[device] for label, device in alike.items()}
        few = find_few(of_model, measure.slow)
        fewest = find_few(of_model, measure.very_slow)
        for label in few.hosts:
            device = alike[label]
            if few.is_draw:
                others = [a for name, a in of_model.items() if name != label]
                ends = (measure.show(min(others)), measure.show(max(others)))
                usual = f"{' to '.join(dict.fromkeys(ends))} elsewhere"
            else:
                kind = "hosts" if device.name == CPU else "GPUs of this model"
                usual = f"{measure.show(few.usual)} on most {kind}"
            # In a draw no single device can be said to crawl.
            is_bad = label in fewest.hosts and not fewest.is_draw
            severity = Severity.FAIL if is_bad else Severity.WARN
            what = f"{measure.action} {measure.show(amounts[device])}"
            found[device] = Problem(what, severity, usual)
    return found


def fold_devices(found: Iterable[tuple[CheckedDevice, Problem]]) -> Problems:
    """Yield problems by host; devices whose problem is alike share one."""
    same: dict[Problem, dict[str, list[str]]] = {}
    for device, problem in found:
        key = problem._replace(what="", host=device.host)
        same.setdefault(key, {}).setdefault(problem.what, []).append(device.name)
    for problem, whats in same.items():
        parts = (f"{name_devices(names)} {what}" for what, names in whats.items())
        yield problem._replace(what="; ".join(parts))


def name_devices(names: Iterable[str]) -> str:
    """Return names of devices as people read them: ``cpu, cuda:0-3,7``."""
    numbers: list[int] = []
    others: list[str] = []
    for name in names:
        number = name.removeprefix(_CUDA)
        if number != name and number.isdecimal():
            numbers.append(int(number))
        else:
            others.append(name)
    gpus = [f"{_CUDA}{format_list(numbers)}"] if numbers else []
    return ", ".join((*others, *gpus))
