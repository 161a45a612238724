"""What collectives can reach in a world -> a table, and a verdict on a measurement."""

from collections.abc import Sequence

from ronde.render.wrapping import WIDTH, wrap
from ronde.topology.limits.bounds import Bound, Limit, LimitWorld, Rate

_NONE = "-"
_LARGE = 10_000


def tabulate_limits(
    world: LimitWorld, bounds: Sequence[Bound], width: int = WIDTH
) -> str:
    """Return the links, a line for each collective, and what is to be said of them.

    Args:
        world: Where the bounds come from.
        bounds: At least one.
        width: Columns to keep sentences to; the table may be wider.
    """
    return (
        f"{_place(world)}, GB/s in one direction\n"
        + "".join(_links(world))
        + "\n"
        + _table(bounds)
        + _notes(world, bounds, width)
    )


def judge(limit: Limit, measured_gb_per_s: float, width: int = WIDTH) -> str:
    """Return how a measured busbw compares with a bound, as sentences."""
    percent = limit.percent(measured_gb_per_s)
    text = f"measured {measured_gb_per_s:g} GB/s: {percent:.1f} % of the bound"
    practical = limit.practical_gb_per_s
    if practical is not None:
        text += f", {100 * measured_gb_per_s / practical:.1f} % of NCCL's"
    doubt = limit.doubt(measured_gb_per_s)
    return wrap("", f"{text}.", width) + (wrap("", f"{doubt}.", width) if doubt else "")


def _place(world: LimitWorld) -> str:
    layout = world.layout
    nodes, ranks = layout.num_nodes, layout.ranks_per_node
    unit = "GPU" if world.has_gpus else "rank"
    return (
        f"{nodes} node{'s' if nodes > 1 else ''} with {ranks} "
        f"{unit}{'s' if ranks > 1 else ''}{' each' if nodes > 1 else ''}"
    )


def _links(world: LimitWorld) -> list[str]:
    rates = [
        ("network", world.network),
        ("GPU", world.gpu),
        ("islands", world.islands.way_out if world.islands else None),
    ]
    known = [(name, rate) for name, rate in rates if rate is not None]
    return [f"  {name:<8} {_tell(rate, world)}\n" for name, rate in known]


def _tell(rate: Rate, world: LimitWorld) -> str:
    practical = rate.practical_gb_per_s
    if practical is None or practical >= rate.gb_per_s or not world.has_gpus:
        return rate.link
    return f"{rate.link}; NCCL counts on {practical:.4g}"


def _table(bounds: Sequence[Bound]) -> str:
    has_practical = any(each.limit and each.limit.practical_gb_per_s for each in bounds)
    rows = [("collective", "bound", "NCCL's", "set by")]
    for each in bounds:
        if each.limit is None:
            rows.append((each.collective, _NONE, _NONE, each.reason))
            continue
        practical = each.limit.practical_gb_per_s
        shown = _NONE if practical is None else _number(practical)
        bound = _number(each.limit.bus_bandwidth_gb_per_s)
        rows.append((each.collective, bound, shown, _setters(each.limit)))
    return "".join(_line(row, has_practical=has_practical) for row in rows)


def _setters(limit: Limit) -> str:
    # What is in brackets stands above the table.
    link, practical = (
        each.partition(" (")[0] for each in (limit.link, limit.practical_link)
    )
    return link if practical in ("", link) else f"{link}; NCCL's by {practical}"


def _number(gb_per_s: float) -> str:
    return f"{gb_per_s:.4g}" if gb_per_s < _LARGE else f"{gb_per_s:.0f}"


def _line(row: tuple[str, str, str, str], *, has_practical: bool) -> str:
    collective, bound, practical, link = row
    middle = f"{practical:>9}" if has_practical else ""
    return f"{collective:<15}{bound:>9}{middle}  {link}\n"


def _notes(world: LimitWorld, bounds: Sequence[Bound], width: int) -> str:
    by_note: dict[str, list[str]] = {}
    for each in bounds:
        for note in each.limit.note.split("; ") if each.limit else ():
            if note:
                by_note.setdefault(note, []).append(each.collective)
    lines = [
        wrap(f"{', '.join(collectives)}: ", note, width, indent=2)
        for note, collectives in by_note.items()
    ]
    if any(each.limit for each in bounds):
        lines += [
            wrap("bounds may be lower: ", why, width, indent=2) for why in world.unknown
        ]
    return "\n" + "".join(lines) if lines else ""
