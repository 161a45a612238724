"""Judges of what each GPU answers; GPUs of a host with one problem share a finding."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from ronde.check.check import (
    Check,
    Fleet,
    Problem,
    Problems,
    Severity,
    Value,
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

        return make_check(judge, judge_all, severity, facts)

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
