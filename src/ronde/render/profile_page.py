"""The report on a profile as one HTML file without external parts."""

import html
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ronde.monitor.advice import find_advice, find_headline, name_report
from ronde.monitor.profiling import Bins, LineReport, ProfileReport, RankReport
from ronde.render.profile import LABELS, describe_sampling, draw_profile

_TEMPLATE = Path(__file__).with_suffix(".html")
_LETTERS = "CMWIFGO"


def write_page(report: ProfileReport, path: Path) -> None:
    """Write the page; all text of the job is data in it, never markup."""
    # In a script, only "<" could end the data.
    data = json.dumps(_page_data(report), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(find_headline(report)),
        "TEXT": html.escape(draw_profile(report)),
        "DATA": data,
    }
    # All at once, since a part may contain another's name.
    template = _TEMPLATE.read_text()
    path.write_text(re.sub("%(\\w+)%", lambda found: parts[found[1]], template))


def _page_data(report: ProfileReport) -> dict[str, object]:
    return {
        "headline": find_headline(report),
        "command": f"job {report.job.job_id}: {shlex.join(report.job.command)}",
        "sampling": describe_sampling(report),
        "kinds": [*zip(_LETTERS, LABELS.values(), strict=True)],
        "seconds": round(report.duration_s, 3),
        "num": report.num_bins,
        "bins": _millionths(report.bins),
        "advice": [each.text for each in find_advice(report)],
        "lines": [_line_data(line) for line in report.lines],
        "ranks": [_rank_data(rank) for rank in report.ranks],
    }


def _line_data(line: LineReport) -> dict[str, object]:
    return {
        "location": line.location,
        "where": f"{line.file}:{line.line} in {line.function}",
        "line": line.line,
        "text": line.text,
        "first": line.first,
        "context": line.context,
        "bins": _millionths(line.bins),
        "ranks": [round(sum(each), 4) for each in line.rank_shares],
    }


def _rank_data(rank: RankReport) -> dict[str, object]:
    return {
        "name": name_report(rank),
        "host": rank.host,
        "blame": rank.blame,
        "bins": _millionths(rank.bins),
        "rss": rank.rss_bytes,
    }


def _millionths(rows: Bins) -> Sequence[Sequence[int]]:
    return [[round(1e6 * value) for value in row] for row in rows]
