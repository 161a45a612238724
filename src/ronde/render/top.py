"""The view of a running job as text: its time, its ranks and its hosts."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isnan
from statistics import fmean

from ronde.monitor.usage import GpuUsage
from ronde.monitor.view import Shares, WatchedHost, WatchedJob, WatchedRank
from ronde.render.jobs import describe_end, describe_job
from ronde.render.text import WIDTH, align, name_ranks, shorten, wrap
from ronde.units import counted, format_duration, grouped, list_first

_MOST_RANKS = 32
_MOST_HOSTS = 20
_MOST_OUTLIERS = 8
_MOST_IN_BRIEF = 4
_MOST_GPUS = 16  # with a row each
_LONG_S = 1.0  # longer than a collective of a healthy job takes
_NOW_LETTERS = 12
SHARE_LETTERS = {
    "compute": "C",
    "communication": "M",
    "waiting": "W",
    "input": "I",
    "other": "O",
}
_SHARE_WORDS = {"waiting": "waiting for a rank", "input": "waiting for input"}
_NO_STEPS = (
    "No steps yet. Ranks report them with hvd.DistributedOptimizer of ronde.torch, or "
    "if the program calls ronde.progress(step=...)."
)
_NO_COMMON_STEP = "The ranks have no recent step in common to split their time by."
_RANKS = (
    *("rank", "host", "step", "step time", "own work", "others wait", "now", "for"),
    *("cores", "memory", "GPU mem"),
)
_HOSTS = ("host", "ranks", "CPU", "memory", "received", "sent", "errors")
_GPUS = ("GPU busy", "GPU memory", "power", "heat", "clock", "slowed by")
_NAMES = ("host", "now", "slowed by")
_LEFT = (*_NAMES, "GPU")
_LEAST_NEEDED = ("step time", "clock", "power", "GPU mem", "GPU memory", "cores", "for")
_LEAST_LETTERS = 12  # of the last column that is shortened


def draw_top(view: WatchedJob, width: int = WIDTH) -> str:
    """Format a view in lines of at most ``width`` letters."""
    return "\n".join(
        draw(view, width) for draw in (draw_summary, draw_shares, draw_tables)
    )


def draw_summary(view: WatchedJob, width: int = WIDTH) -> str:
    """Return three lines: the command, the ranks, and the figures of the job."""
    hosts = [each.host for each in view.hosts]
    lines = describe_job(view.job, len(view.ranks), hosts, width)
    figures: list[str] = []
    if view.step is not None:
        figures.append(f"step {view.step:,}")
    if view.step_s is not None:
        figures.append(f"step time {format_duration(view.step_s)}")
    if view.step_p99_s is not None:
        figures.append(f"p99 {format_duration(view.step_p99_s)}")
    if view.tokens_per_s is not None:
        figures.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.loss is not None:
        loss = "not finite" if isnan(view.loss) else f"{view.loss:.4g}"
        figures.append(f"loss {loss}")
    more = (shorten(", ".join(figures), width - 3),) if figures else ()
    return "\n".join((*lines, *more)) + "\n"


def draw_shares(view: WatchedJob, width: int = WIDTH) -> str:
    """Return the split of the ranks' time as a bar of letters, and their meaning."""
    if view.shares is None:
        text = _NO_STEPS if view.step is None else _NO_COMMON_STEP
        return wrap("", text, width, indent=0)
    parts: list[str] = []
    for name, letter in SHARE_LETTERS.items():
        share = getattr(view.shares, name)
        if round(share, 2) > 0:
            text = f"{letter} {_SHARE_WORDS.get(name, name)} {share:.0%}"
            parts.append(text.replace(" ", "\xa0"))
    words = wrap("", "   ".join(parts), width, indent=0).replace("\xa0", " ")
    return f"{_draw_bar(view.shares, width)}\n{words}"


def _draw_bar(shares: Shares, width: int) -> str:
    ends, total = [0], 0.0
    for share in shares:
        total += max(0.0, share)
        ends.append(round(total * width))
    lengths = [end - start for start, end in pairwise(ends)]
    letters = zip(SHARE_LETTERS.values(), lengths, strict=True)
    return "".join(letter * length for letter, length in letters)[:width]


def draw_tables(
    view: WatchedJob, width: int = WIDTH, *, is_complete: bool = False
) -> str:
    """Return the hang, the ranks by blame, and the hosts, all if ``is_complete``.

    Of many ranks only the outliers are shown.
    """
    ranks = view.ranks
    if len(ranks) > _MOST_RANKS:
        ranks = [each for each in ranks if each.marks][:_MOST_OUTLIERS]
    text = "No rank stands out.\n"
    if ranks:
        text = _draw_ranks(ranks, width, has_hosts=len(view.hosts) > 1)
    if ranks and len(ranks) < len(view.ranks):
        text = "The ranks to look at first:\n" + text
    first = {each.host for each in ranks if each.marks}
    hosts = sorted(
        view.hosts, key=lambda each: (not each.marks, each.host not in first)
    )
    most = len(hosts) if is_complete else _MOST_HOSTS
    tables = (text, _draw_hosts(hosts, most, width))
    parts = (_draw_hang(view, width), *tables, _draw_notes(hosts, width))
    return "\n".join(filter(None, parts))


def draw_brief(view: WatchedJob, width: int = WIDTH) -> str:
    """Return a few lines: the figures of the job, its time, and its first ranks."""
    figures = draw_summary(view, width).split("\n", 2)[2]
    ranks = view.ranks[:_MOST_IN_BRIEF]
    text = f"{figures}{draw_shares(view, width)}{_draw_hang(view, width)}"
    num_left = len(view.ranks) - len(ranks)
    more = f"and {counted(num_left, 'more rank')}\n" if num_left else ""
    table = _draw_ranks(ranks, width, has_hosts=len(view.hosts) > 1)
    return f"{'-' * width}\n{text}{table}{more}"


def draw_over(view: WatchedJob | None) -> str:
    """Return a sentence on a job that is over, with the ends of ranks if known."""
    ranks = view.ranks if view else ()
    ended = [each for each in ranks if each.state in ("ended", "lost")]
    failed = grouped(
        (describe_end(each.state, each.exit_code), each.worker)
        for each in ended
        if each.exit_code != 0
    )
    texts = [f"{name_ranks(own)}: {end}" for end, own in failed.items()]
    if ended and len(ended) == len(ranks) and not failed:
        texts = ["all ranks ended with exit code 0"]
    return "; ".join(("The job is over", *texts)) + "."


def _draw_hang(view: WatchedJob, width: int) -> str:
    """Return a sentence if the job hangs."""
    text = f"{view.hang} ronde why shows the reason."
    return wrap("", text, width, indent=0) if view.hang else ""


def _draw_ranks(ranks: Iterable[WatchedRank], width: int, *, has_hosts: bool) -> str:
    rows = [_rank_row(each if has_hosts else each._replace(host="")) for each in ranks]
    return _fit(_RANKS, rows, width)


def _rank_row(rank: WatchedRank) -> tuple[str, ...]:
    now, age_s = rank.collective, rank.collective_age_s
    if rank.state != "running":
        now = describe_end(rank.state, rank.exit_code).removeprefix("killed by ")
    elif "silent" in rank.marks:
        now, age_s = "silent", rank.status_age_s
    elif not rank.is_reporting:
        now = "reports nothing"
    return (
        "-" if rank.rank is None else str(rank.rank),
        rank.host,
        "" if rank.step is None else str(rank.step),
        "" if rank.step_s is None else format_duration(rank.step_s),
        "" if rank.slowness is None else f"{round(rank.slowness - 1.0, 2) + 0.0:+.0%}",
        f"{rank.blame:.0%}" if round(rank.blame, 2) else "",
        # The columns keep their widths while ranks enter and leave collectives.
        now.ljust(_NOW_LETTERS),
        (format_duration(age_s) if now and age_s >= _LONG_S else "").rjust(5),
        "" if rank.cpu is None else f"{rank.cpu:.1f}",
        _memory(rank.rss_bytes) if rank.rss_bytes else "",
        _memory(rank.device_bytes) if rank.device_bytes else "",
    )


def _draw_hosts(hosts: Sequence[WatchedHost], most: int, width: int) -> str:
    """Return a row for each host, and one for each GPU if they are few."""
    found = {each.host: each.usage.gpus if each.usage else () for each in hosts}
    has_rows = sum(map(len, found.values())) <= _MOST_GPUS
    rows = [
        (*_host_row(each), *_gpu_cells(() if has_rows else found[each.host]))
        for each in hosts[:most]
    ]
    text = _fit((*_HOSTS, *_GPUS), rows, width)
    if (num_left := len(hosts) - most) > 0:
        text += f"and {counted(num_left, 'more host')}\n"
    gpus = [
        (f"{host} {gpu.number}" if len(hosts) > 1 else str(gpu.number), gpu)
        for host, own in found.items()
        for gpu in own
    ]
    if gpus and has_rows:
        rows = [(name, *_gpu_cells([gpu])) for name, gpu in gpus]
        text += "\n" + _fit(("GPU", *_GPUS), rows, width)
    return text


def _host_row(host: WatchedHost) -> tuple[str, ...]:
    usage = host.usage
    return (
        host.host,
        str(host.num_ranks),
        "" if host.cpu is None else f"{host.cpu:.0%}",
        _part(usage.memory_bytes, usage.total_memory_bytes) if usage else "no answer",
        _rate(host.received_per_s),
        _rate(host.sent_per_s),
        str(host.num_errors) if host.num_errors else "",
    )


def _gpu_cells(gpus: Sequence[GpuUsage]) -> tuple[str, ...]:
    """Return the mean or sum of some GPUs' figures, the most heat and least clock."""
    busy = [each.utilization for each in gpus if each.utilization is not None]
    used = sum(each.memory_bytes or 0 for each in gpus)
    total = sum(each.total_memory_bytes or 0 for each in gpus)
    power_w = sum(each.power_w or 0.0 for each in gpus)
    heat_c = max((each.temperature_c or 0.0 for each in gpus), default=0.0)
    clocks = [each.clock_mhz for each in gpus if each.clock_mhz]
    reasons = dict.fromkeys(text for each in gpus for text in each.throttled_by)
    return (
        f"{fmean(busy):.0%}" if busy else "",
        _part(used, total) if total else "",
        f"{power_w:.0f}W" if power_w else "",
        f"{heat_c:.0f}°C" if heat_c else "",
        f"{min(clocks)}MHz" if clocks else "",
        ", ".join(reasons),
    )


def _draw_notes(hosts: Iterable[WatchedHost], width: int) -> str:
    """Return a sentence on each trouble, with the hosts that have it."""
    pairs = [(text, each.host) for each in hosts for text in each.marks]
    return "".join(
        wrap("", f"{list_first(names, 4)}: {text}.", width, indent=0)
        for text, names in grouped(pairs).items()
    )


def _fit(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without empty columns; if it is too wide, shorten or drop some."""
    if not rows:
        return ""
    cells = dict(zip(titles, zip(*rows, strict=True), strict=True))
    cells = {title: own for title, own in cells.items() if any(own)}
    for dropped in ("", *_LEAST_NEEDED):
        cells.pop(dropped, None)
        sizes = {t: max(map(len, (t, *own))) for t, own in cells.items()}
        names = [name for name in _NAMES if name in cells]
        free = width - sum(sizes.values()) - 2 * (len(sizes) - 1)
        for name in reversed(names):
            least = max(len(name), min(sizes[name], _LEAST_LETTERS))
            most = max(least, sizes[name] + min(0, free))
            free += sizes[name] - most
            cells[name] = tuple(_cut(each, most) for each in cells[name])
        if free >= 0:
            break
    right = [title for title in cells if title not in _LEFT]
    return align([tuple(cells), *zip(*cells.values(), strict=True)], right=right)


def _cut(text: str, most: int) -> str:
    short = text.rstrip()
    return text[:most] if len(short) <= most else f"{text[: most - 2]}.."


def _memory(size_bytes: int) -> str:
    gib = size_bytes / (1 << 30)
    if gib < 1.0:
        return f"{gib * 1024:.0f}MiB"
    return f"{gib:.1f}GiB" if gib < 9.95 else f"{gib:,.0f}GiB"


def _part(used_bytes: int, total_bytes: int) -> str:
    return f"{_memory(used_bytes).removesuffix('GiB')}/{_memory(total_bytes)}"


def _rate(bytes_per_s: float | None) -> str:
    if bytes_per_s is None:
        return ""
    is_giga = bytes_per_s >= 0.9995e9
    return f"{bytes_per_s / (1e9 if is_giga else 1e6):.1f}{'GB' if is_giga else 'MB'}/s"
