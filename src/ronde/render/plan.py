"""A job that is not started: where each rank would run, and with which variables."""

import shlex
from itertools import groupby

from ronde.launch.controller import JobPlan
from ronde.launch.environments import redacted
from ronde.launch.hosts.host import RankResources
from ronde.render.text import align, counted, format_runs
from ronde.topology.cpu_sets import format_list
from ronde.topology.machine import UNKNOWN_NODE

_TITLES = ("host", "rank", "local", "device", "cores", "CPUs", "memory", "NIC", "why")
_UNSET = "(unset)"


def plan_text(plan: JobPlan) -> str:
    """Return all of a plan but secrets; hosts and ranks that are alike share a line."""
    shared, own = _environments(plan)
    size = f"{counted(plan.size, 'rank')} on {counted(len(plan.shares), 'host')}"
    lines = [
        f"{size}, meeting at {plan.address}: {shlex.join(plan.spec.argv)}",
        "",
        align([_TITLES, *_rows(plan)]),
        *(f"note: {notice}" for notice in plan.notices),
        *([""] if plan.notices else []),
        "variables of all ranks, in addition to each host's own:",
        *(
            f"  {name}={shlex.quote(value) if value.isprintable() else repr(value)}"
            for name, value in shared.items()
        ),
        "",
        "variables of each rank, by rank:",
        *(f"  {name}: {value}" for name, value in own.items()),
        "",
        "Nothing was started.",
    ]
    return "\n".join(lines) + "\n"


def _rows(plan: JobPlan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    hosts = zip(plan.shares, plan.places, strict=True)
    for places, alike in groupby(hosts, key=lambda host: host[1]):
        first, *others = [share for share, _ in alike]
        start, local = first.ranks.start, 0
        for place, same in groupby(places):
            num = len(list(same))
            spans = [_span(range(at, at + num)) for at in (start + local, local)]
            rows.append((first.host.name, *spans, *_cells(place)))
            local += num
        if others:
            names = format_runs([share.host.name for share in others])
            ranks = range(others[0].ranks.start, others[-1].ranks.stop)
            rows.append((names, _span(ranks), f"as on {first.host.name}"))
    return rows


def _cells(place: RankResources) -> tuple[str, ...]:
    node = "-" if place.memory_node == UNKNOWN_NODE else str(place.memory_node)
    return (
        place.device or "-",
        str(place.num_cores),
        format_list(place.cpus) or "all",
        node,
        place.nic or "-",
        place.why,
    )


def _span(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _environments(plan: JobPlan) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that are equal on all ranks, and the others in words."""
    ranks = [job.env | rank.env for job in plan.jobs(0) for rank in job.ranks]
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    for name in sorted({name for env in ranks for name in env}):
        values = [env.get(name, _UNSET) for env in ranks]
        # A value that thousands of ranks have is looked at once.
        shown = {value: redacted({name: value})[name] for value in set(values)}
        if len(shown) == 1:
            shared[name] = shown[values[0]]
        else:
            own[name] = format_runs([shown[value] for value in values])
    return shared, own
