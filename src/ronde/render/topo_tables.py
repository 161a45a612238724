"""Tables of a host: path classes, placements, limits, differences."""

from collections.abc import Mapping, Sequence

from ronde.render.text import align, list_some, wrap
from ronde.topology.comparison import (
    Difference,
    HostComparison,
    PathChange,
    PathComparison,
)
from ronde.topology.cpu_sets import format_list
from ronde.topology.limits import Bound, Limit, LimitWorld, Rate
from ronde.topology.paths.classes import UNKNOWN_WORD, ClassTable
from ronde.topology.paths.network import Paths
from ronde.topology.placement.mesh import AxisPlan, MeshPlan
from ronde.topology.placement.plan import HostPlan, PlannedRank
from ronde.units import counted, format_duration, format_size, grouped

# A longer list of CPUs is cut.
_MOST_LIST_CHARS = 23
_LEGEND = {
    "X": "itself",
    "SYS": "over PCIe and the links between processors",
    "NODE": "over PCIe and the links between host bridges of one NUMA node",
    "PHB": "over PCIe and a host bridge, within one NUMA node",
    "PXB": "over several PCIe switches and no host bridge",
    "PIX": "over one PCIe switch at most",
    "NV#": "over # NVLinks",
    "XGMI": "over xGMI",
    UNKNOWN_WORD: "unknown",
}
_MAX_PAIRS = 3
_MAX_CHANGES = 3
_MAX_NAMES = 4
_MAX_VALUE = 60
_NAMES = ("bus address", "port")
_PLAN_HEAD = ("rank", "GPU", "bus", "cores", "CPUs", "memory", "adapter", "aligned")
_BUS = _PLAN_HEAD.index("bus")
_TRAFFIC_HEAD = ("axis", "a step", "GB/s", "time", "slowest link of a group")
_NONE = "-"
_LARGE = 10_000
_NOTHING = "no GPU and no network adapter\n"


def tabulate_classes(table: ClassTable) -> str:
    """Return a table like that of ``nvidia-smi topo -m``, with a legend."""
    # The legend explains the words that occur.
    if not table.names:
        return _NOTHING
    most = _MOST_LIST_CHARS
    cpus = tuple(
        text if len(text) <= most else text[: text.rfind(",", 0, most - 3) + 1] + "..."
        for text in table.cpus
    )
    lists = {"CPU Affinity": cpus, "NUMA Affinity": table.nodes}
    lists = {heading: texts for heading, texts in lists.items() if any(texts)}
    cells = zip(table.labels, table.words, *lists.values(), strict=True)
    rows = [(label, *words, *tail) for label, words, *tail in cells]
    matrix = align([("", *table.labels, *lists), *rows])
    titled = table.labels[len(table.labels) - len(table.titles) :]
    titles = "".join(f"  {a}: {b}\n" for a, b in zip(titled, table.titles, strict=True))
    words = {word for row in table.words for word in row}
    used = {"NV#" if word.startswith("NV") else word for word in words}
    legend = "".join(f"  {w:<4} = {text}\n" for w, text in _LEGEND.items() if w in used)
    return "\n".join(part for part in (matrix, titles, legend) if part)


def tabulate_speeds(paths: Paths, table: ClassTable) -> str:
    if not table.names:
        return _NOTHING
    num_gpus = len(table.names) - len(table.titles)
    rows = slice(0, num_gpus or None)

    def speed(one: str, other: str, word: str) -> str:
        path = paths.between(one, other)
        if path is None or one == other:
            return word
        return f"{path.kind} {path.gb_per_s:.1f}" if paths.is_known(path) else path.kind

    cells = [
        [speed(one, *other) for other in zip(table.names, words, strict=True)]
        for one, words in zip(table.names[rows], table.words[rows], strict=True)
    ]
    labelled = zip(table.labels[rows], cells, strict=True)
    text = align([("", *table.labels), *((label, *row) for label, row in labelled)])
    figures = [cell for row in cells for cell in row if cell != "X"]
    is_lacking = any(" " not in cell for cell in figures)
    note = "; none where unknown" if is_lacking else ""
    return text + f"\nGB/s in one direction, as NCCL counts{note}\n"


def tabulate_plan(plan: HostPlan) -> str:
    together = " together" if plan.scope == "job" else ""
    text = (
        f"{plan.host or 'host'}: {counted(len(plan.ranks), 'rank')}, policy "
        f"{plan.policy}{together}\n\n"
    )
    is_judged = plan.policy != "none" and any(rank.cpus for rank in plan.ranks)
    rows = [_PLAN_HEAD, *(_plan_row(rank, is_judged=is_judged) for rank in plan.ranks)]
    addresses = [rank.gpu_bus_ids for rank in plan.ranks]
    # There is only room for one address per rank.
    if max(map(len, addresses)) > 1 or not any(map(any, addresses)):
        rows = [(*row[:_BUS], *row[_BUS + 1 :]) for row in rows]
    text += align(rows)
    by_reasons = grouped((rank.reasons, rank.rank) for rank in plan.ranks)
    by_reasons.pop((), None)
    text += "".join(f"note: {notice}\n" for notice in plan.notices)
    for reasons, own in by_reasons.items():
        ranks = f"rank{'s' * (len(own) > 1)} {format_list(own)}"
        text += f"note: {ranks} not aligned: {'; '.join(reasons)}\n"
    far = [r.rank for r in plan.ranks if any(nic.path == "SYS" for nic in r.nics)]
    if far:
        ranks = f"rank{'s' * (len(far) > 1)} {format_list(far)}"
        text += f"note: {ranks}: adapter at another processor (SYS); aligned is about "
        text += "cores, memory and GPU alone\n"
    if plan.env:
        text += "\nvariables of all ranks:\n"
        text += "".join(f"  {name}={value}\n" for name, value in plan.env.items())
    if lines := [f"  {r.rank}: {r.command}\n" for r in plan.ranks if r.command]:
        text += "".join(["\neach rank by hand, before the program:\n", *lines])
    return text


def _plan_row(rank: PlannedRank, *, is_judged: bool) -> tuple[str, ...]:
    adapters = [f"{n.name} ({n.path})" if n.path else n.name for n in rank.nics]
    aligned = "yes" if rank.is_preferred else "no"
    return (
        str(rank.rank),
        ",".join(map(str, rank.gpus)) or _NONE,
        ",".join(each.removeprefix("0000:") for each in rank.gpu_bus_ids) or _NONE,
        str(rank.num_cores or _NONE),
        format_list(rank.cpus) or _NONE,
        ",".join(map(str, rank.memory_nodes)) or _NONE,
        ", ".join(adapters) or _NONE,
        aligned if is_judged else _NONE,
    )


def tabulate_traffic(plan: MeshPlan, sent_bytes: Mapping[str, float]) -> str:
    rows: list[Sequence[str]] = [_TRAFFIC_HEAD]
    total_s = 0.0
    for axis in plan.axes:
        num_bytes, rate, duration = sent_bytes[axis.axis], _NONE, _NONE
        if axis.gb_per_s is not None:
            seconds = num_bytes / (axis.gb_per_s * 1e9)
            total_s += seconds
            rate, duration = f"{axis.gb_per_s:.4g}", format_duration(seconds)
        size = format_size(round(num_bytes))
        rows.append((axis.axis, size, rate, duration, _link_of(axis)))
    if not plan.axes:
        return "no groups\n"
    text = align(rows, right=_TRAFFIC_HEAD[1:-1])
    if all(axis.gb_per_s is not None for axis in plan.axes):
        text += f"\n{format_duration(total_s)} in all where nothing is hidden\n"
    for axis in plan.axes:
        text += "".join(wrap(f"{axis.axis}: ", why, indent=2) for why in axis.unknown)
    return text


def _link_of(axis: AxisPlan) -> str:
    share = f"1/{axis.num_sharing} of " if axis.num_sharing > 1 else ""
    # Leave out the rate after the name: it is that of all groups together.
    return share + axis.link.partition(", ")[0] or "unknown"


def tabulate_limits(world: LimitWorld, bounds: Sequence[Bound]) -> str:
    layout = world.layout
    nodes, unit = layout.num_nodes, "GPU" if world.has_gpus else "rank"
    ranks = counted(layout.ranks_per_node, unit)
    text = f"{counted(nodes, 'node')} with {ranks}{' each' if nodes > 1 else ''}"
    text += ", GB/s in one direction\n"
    islands = world.islands.way_out if world.islands else None
    rates = {"network": world.network, "GPU": world.gpu, "islands": islands}
    for name, rate in rates.items():
        if rate is not None:
            text += f"  {name:<8} {_rate(rate, world)}\n"
    has_practical = any(each.limit and each.limit.practical_gb_per_s for each in bounds)
    rows = [("collective", "bound", "NCCL's", "set by"), *map(_limit_row, bounds)]
    text += "\n"
    for collective, bound, practical, link in rows:
        middle = f"{practical:>9}" if has_practical else ""
        text += f"{collective:<15}{bound:>9}{middle}  {link}\n"
    return text + _limit_notes(world, bounds)


def _rate(rate: Rate, world: LimitWorld) -> str:
    practical = rate.practical_gb_per_s
    if practical is None or practical >= rate.gb_per_s or not world.has_gpus:
        return rate.link
    return f"{rate.link}; NCCL counts on {practical:.4g}"


def _limit_row(bound: Bound) -> tuple[str, str, str, str]:
    limit = bound.limit
    if limit is None:
        return bound.collective, _NONE, _NONE, bound.reason
    rates = [
        _NONE if rate is None else f"{rate:.4g}" if rate < _LARGE else f"{rate:.0f}"
        for rate in (limit.bus_bandwidth_gb_per_s, limit.practical_gb_per_s)
    ]
    # Text in brackets is above the table.
    link = limit.link.partition(" (")[0]
    practical = limit.practical_link.partition(" (")[0]
    setter = link if practical in ("", link) else f"{link}; NCCL's by {practical}"
    return bound.collective, rates[0], rates[1], setter


def _limit_notes(world: LimitWorld, bounds: Sequence[Bound]) -> str:
    by_note = grouped(
        (note, each.collective)
        for each in bounds
        for note in (each.limit.note.split("; ") if each.limit else ())
    )
    by_note.pop("", None)
    text = ""
    for note, collectives in by_note.items():
        text += wrap(f"{', '.join(collectives)}: ", note, indent=2)
    if any(each.limit for each in bounds):
        for why in world.unknown:
            text += wrap("bounds may be lower: ", why, indent=2)
    return f"\n{text}" if text else ""


def compare_with_limit(limit: Limit, measured_gb_per_s: float) -> str:
    percent = limit.percent(measured_gb_per_s)
    text = f"measured {measured_gb_per_s:g} GB/s: {percent:.1f} % of the bound"
    practical = limit.practical_gb_per_s
    if practical is not None:
        text += f", {100 * measured_gb_per_s / practical:.1f} % of NCCL's"
    warning = limit.warning(measured_gb_per_s)
    return wrap("", f"{text}.") + (wrap("", f"{warning}.") if warning else "")


def draw_comparison(first: str, second: str, comparison: HostComparison) -> str:
    sides = ("A", comparison.missing_first), ("B", comparison.missing_second)
    left_out = "".join(
        wrap("", f"{side} has no {' and no '.join(roles)}: not compared.")
        for side, roles in sides
        if roles
    )
    if comparison.is_equal:
        num_pairs = sum(each.num_pairs for each in comparison.paths)
        return (
            f"{first} and {second} are alike: {comparison.num_matched} elements and "
            f"{num_pairs} paths.\n{left_out}"
        )
    only = {"A": comparison.only_first, "B": comparison.only_second}
    parts = [
        f"A: {first}\nB: {second}\n",
        _draw_paths(comparison.paths),
        _draw_differences(comparison.differences),
        *(
            wrap("", f"only in {side}: {list_some(names, 8, 'elements')}")
            for side, names in only.items()
            if names
        ),
        left_out,
    ]
    return "\n".join(part for part in parts if part)


def _draw_paths(paths: Sequence[PathComparison]) -> str:
    shown = [each for each in paths if each.num_pairs]
    text = "paths, in NCCL's figures (A -> B):\n" if shown else ""
    for each in shown:
        text += f"  {each.kind}: {len(each.changes)} of {each.num_pairs} pairs differ\n"
        groups = grouped((_describe(change), change) for change in each.changes)
        for words, changes in sorted(groups.items(), key=lambda g: g[1][0].kept):
            names = ["-".join(change.ends) for change in changes]
            text += wrap("    ", f"{words}: {list_some(names, _MAX_PAIRS, 'pairs')}")
    return text


def _describe(change: PathChange) -> str:
    words = " -> ".join(
        f"{path.kind} {path.gb_per_s:g} GB/s" if path.gb_per_s else path.kind
        for path in (change.was, change.now)
    )
    return words if change.kept == 1 else f"{words} ({change.kept - 1:+.0%})"


def _draw_differences(differences: Sequence[Difference]) -> str:
    by_fact = grouped((each.fact, each) for each in differences)

    def order(fact: str) -> tuple[bool, float]:
        # The greatest loss first, names last.
        rates = [
            each.now_gb_per_s / each.was_gb_per_s
            for each in by_fact[fact]
            if each.was_gb_per_s and each.now_gb_per_s
        ]
        return fact in _NAMES, min(rates, default=1.0)

    facts = [_draw_fact(fact, by_fact[fact]) for fact in sorted(by_fact, key=order)]
    return "".join(["what differs (A -> B):\n", *facts]) if facts else ""


def _draw_fact(fact: str, differences: Sequence[Difference]) -> str:
    groups = grouped((_change(each), each.element) for each in differences)
    if fact in _NAMES:
        names = list_some(list(groups), _MAX_CHANGES, "elements")
        return wrap("  ", f"{fact}: {names}")
    ordered = sorted(groups, key=lambda change: -len(groups[change]))
    text = ""
    for change in ordered[:_MAX_CHANGES]:
        names = list_some(groups[change], _MAX_NAMES, "elements")
        text += wrap("  ", f"{fact}: {change}: {names}")
    left = len(ordered) - _MAX_CHANGES
    return text + (f"       and {left} more of this kind\n" if left > 0 else "")


def _change(each: Difference) -> str:
    was = _value(each.was, each.was_gb_per_s)
    return f"{was} -> {_value(each.now, each.now_gb_per_s)}"


def _value(value: str, gb_per_s: float) -> str:
    short = value if len(value) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."
    return f"{short} ({gb_per_s:g} GB/s)" if gb_per_s else short
