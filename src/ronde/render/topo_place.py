"""A placement as text: a table of ranks, and what to type to have it by hand."""

from collections.abc import Sequence

from ronde.topology.cpu_sets import format_list
from ronde.topology.placement.plan import HostPlan, NicChoice, PlannedRank

_HEAD = ("rank", "GPU", "bus", "cores", "CPUs", "memory", "adapter", "aligned")
_BUS = _HEAD.index("bus")
_FIRST_DOMAIN = "0000:"
_GAP = "  "


def tabulate_plan(plan: HostPlan) -> str:
    """Return a table of all ranks, notices, and the variables and commands for them."""
    num_ranks = len(plan.ranks)
    together = " together" if plan.scope == "job" else ""
    text = (
        f"{plan.host or 'host'}: {num_ranks} rank{'s' * (num_ranks > 1)}, policy "
        f"{plan.policy}{together}\n\n"
    )
    is_judged = plan.policy != "none" and any(rank.cpus for rank in plan.ranks)
    rows = [_HEAD, *(_row(rank, is_judged=is_judged) for rank in plan.ranks)]
    addresses = [rank.gpu_bus_ids for rank in plan.ranks]
    # There is room for one a rank.
    if max(map(len, addresses)) > 1 or not any(map(any, addresses)):
        rows = [(*row[:_BUS], *row[_BUS + 1 :]) for row in rows]
    text += _table(rows)
    notices = [*plan.notices, *_reasons(plan.ranks)]
    text += "".join(f"{'note: ' + notice}\n" for notice in notices)
    if plan.env:
        text += "\nvariables of all ranks:\n"
        text += "".join(f"  {name}={value}\n" for name, value in plan.env.items())
    lines = [_by_hand(rank) for rank in plan.ranks]
    if any(lines):
        text += "\neach rank by hand, before the program:\n"
        text += "".join(f"  {n}: {line}\n" for n, line in enumerate(lines) if line)
    return text


def _row(rank: PlannedRank, *, is_judged: bool) -> tuple[str, ...]:
    aligned = "yes" if rank.is_preferred else "no"
    return (
        str(rank.rank),
        ",".join(map(str, rank.gpus)) or "-",
        ",".join(each.removeprefix(_FIRST_DOMAIN) for each in rank.gpu_bus_ids) or "-",
        str(rank.num_cores or "-"),
        format_list(rank.cpus) or "-",
        ",".join(map(str, rank.memory_nodes)) or "-",
        ", ".join(_adapter(nic) for nic in rank.nics) or "-",
        aligned if is_judged else "-",
    )


def _adapter(nic: NicChoice) -> str:
    return f"{nic.name} ({nic.path})" if nic.path else nic.name


def _reasons(ranks: Sequence[PlannedRank]) -> list[str]:
    """Return why ranks are not aligned, those of the same reasons in one sentence."""
    by_reasons: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        if rank.reasons:
            by_reasons.setdefault(rank.reasons, []).append(rank.rank)
    return [
        f"rank{'s' * (len(own) > 1)} {format_list(own)} not aligned: "
        f"{'; '.join(reasons)}"
        for reasons, own in by_reasons.items()
    ]


def _by_hand(rank: PlannedRank) -> str:
    words = [f"{name}={value}" for name, value in rank.env.items()]
    return " ".join([*words, rank.command] if rank.command else words)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        _GAP.join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        + "\n"
        for row in rows
    )
