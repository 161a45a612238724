"""Writes the output of each command into docs/plan.md."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from ronde.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plan.md"
SAMPLES = ROOT / "tests" / "cli" / "plan_samples"
"""The directory in which the commands of the page run."""


def draw_page(text: str) -> str:
    """Return the page with the present output behind each command."""

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(shlex.split(block[1])) == 0, block[1]
        return f"```console\n$ ronde {block[1]}\n{printed.getvalue()}```"

    return re.sub(r"```console\n\$ ronde (.*)\n[^`]*```", run, text)


if __name__ == "__main__":
    os.chdir(SAMPLES)
    PAGE.write_text(draw_page(PAGE.read_text()))
