"""Every check has all its texts, and the documentation has the same."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from scripts.check_pages import draw_page
from tests.check.fleets import CHECKS
from tests.limits import HANG_S

from ronde.check import Family, Severity, all_checks
from ronde.cli import main
from ronde.render import explain_check

DOCS = Path(__file__).parents[2] / "docs"
TOLD = ("title", "reads", "threshold", "source", "fix", "why")


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_a_check_has_all_its_texts(check):
    lacking = [name for name in TOLD if not getattr(check, name).strip()]
    assert not lacking
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
    assert isinstance(check.severity, Severity)
    assert isinstance(check.family, Family)


def test_no_two_checks_share_an_id():
    counts = Counter(check.id for check in all_checks())
    assert [name for name, count in counts.items() if count > 1] == []
    assert not counts.keys() & {str(family) for family in Family}


def test_checks_work_without_docstrings():
    words = [sys.executable, "-OO", "-m", "ronde", "check", "list"]
    done = subprocess.run(words, capture_output=True, check=True, timeout=HANG_S)
    listed = re.findall(r"^  (\S+)", done.stdout.decode(), re.MULTILINE)
    assert sorted(listed) == sorted(check.id for check in all_checks())


def test_the_page_is_up_to_date():
    assert (DOCS / "checks.md").read_text() == draw_page(all_checks()), (
        "type: python scripts/check_pages.py"
    )


def test_one_check_is_explained():
    text = explain_check(CHECKS[0], width=50)
    assert text.splitlines() == [
        "locked-memory: locked-memory is as it should be",
        "  reads       /proc/self/limits",
        "  threshold   at least 32 GiB",
        "  source      a vendor's guide",
        "  severity    fail",
        "  why         training crawls",
        "  fix         ulimit -l unlimited",
    ]


def test_the_guide_names_existing_options_and_checks(capsys):
    assert main(["check", "--help"]) == 0
    known = set(re.findall(r"(?<!\S)--[a-z-]+", capsys.readouterr().out))
    guide = (DOCS / "check.md").read_text()
    options = set(re.findall(r"`(?:ronde run )?(--[a-z-]+)", guide))
    assert options
    assert options <= known | {"--master-port"}
    ids = set(re.findall(r"^[x!i] ([a-z-]+):", guide, re.MULTILINE))
    assert ids
    assert ids <= {check.id for check in all_checks()}
