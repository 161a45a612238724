"""Writes into docs/plan.md the output of its commands, and the published results."""

import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path

from ronde.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plan.md"
SAMPLES = ROOT / "tests" / "cli" / "plan_samples"
"""The directory in which the commands of the page run."""
_BEGIN, _END = "<!-- published -->\n", "<!-- end -->\n"
_HOROVOD = "--per-node 4 --batch 64 --unit images --link 25Gbit/s --transport rdma "
_RESNET = "--parameters 25.56M --unit images --dtype float16 --transport rdma "
_BERT = "--parameters 336M --unit sequences --dtype float16 --transport rdma "
_V100, _A100 = "--gpu-link 110GB/s ", "--gpu-link 230GB/s "
_PICTURED = (
    "plan --points 1=253.1,4=925,8=1282 --per-node 4 --parameters 25.6M --batch 64 "
    "--unit images --overlap none --link 10Gbit/s --transport tcp --nodes 2..128"
)
PUBLISHED = (  # name, options, ranks, published speed
    ("VGG-16", "--points 1=154 --parameters 138.4M " + _HOROVOD, 128, 0.79 * 128 * 154),
    ("VGG-16", "--points 1=154 --parameters 138.4M " + _HOROVOD, 512, 0.68 * 512 * 154),
    (
        *("Inception V3", "--points 1=142 --parameters 23.8M " + _HOROVOD),
        *(512, 0.9 * 512 * 142),
    ),
    (
        *("ResNet-101", "--points 1=130 --parameters 44.5M " + _HOROVOD),
        *(512, 0.9 * 512 * 130),
    ),
    (
        *("Summit, 27,600 V100", "--points 6=6 --per-node 6 --link 2x100Gbit/s"),
        *(27_600, 0.93 * 27_600),
    ),
    (
        "MLPerf ResNet-50, DGX-2H",
        "--points 16=25053 --per-node 16 --batch 208 --link 8x100Gbit/s "
        "--global-batch 33280 " + _RESNET + _V100,
        *(512, 625_187.7),
    ),
    (
        "MLPerf ResNet-50, DGX A100",
        "--points 8=22239.9 --per-node 8 --batch 408 --link 8x200Gbit/s "
        "--global-batch 3264 " + _RESNET + _A100,
        *(16, 36_987.8),
    ),
    (
        "MLPerf BERT, DGX A100",
        "--points 8=1015.2 --per-node 8 --batch 32 --link 8x200Gbit/s "
        "--global-batch 5120 " + _BERT + _A100,
        *(256, 23_157.6),
    ),
)


def draw_page(text: str) -> str:
    """Return the page with the present output behind each command."""

    def show(block: re.Match[str]) -> str:
        return f"```console\n$ ronde {block[1]}\n{_run(block[1])}```"

    text = re.sub(r"```console\n\$ ronde (.*)\n[^`]*```", show, text)
    head, rest = text.split(_BEGIN)
    return head + _BEGIN + _published() + _END + rest.split(_END)[1]


def _run(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(shlex.split(command))
    if code:
        raise SystemExit(f"{command}: exit code {code}")
    return printed.getvalue()


def _published() -> str:
    text = "| given | ranks | predicted | 80 % | published | |\n" + "|---" * 6 + "|\n"
    for name, options, ranks, speed in PUBLISHED:
        row = json.loads(_run(f"plan {options} -n {ranks} --json"))["rows"][-1]
        middle, low, high = row["units_per_s"], row["low"], row["high"]
        error = "-" if middle is None else f"{middle:,.0f} ({middle / speed - 1:+.0%})"
        is_inside = "inside" if low <= speed <= high else "**outside**"
        text += (
            f"| {name}: `{options.strip()}` | {ranks:,} | {error} | "
            f"{low:,.0f} .. {high:,.0f} | {speed:,.0f} | {is_inside} |\n"
        )
    return text


if __name__ == "__main__":
    os.chdir(SAMPLES)
    PAGE.write_text(draw_page(PAGE.read_text()))
    _run(f"{_PICTURED} --svg {PAGE.parent / 'img' / 'plan.svg'}")
