"""Every command of docs/plan.md prints its page's output; numbers within 2 %."""

import re

import pytest
from scripts.plan_page import PAGE, SAMPLES, draw_page

NUMBER = r"\d[\d,]*(?:\.\d+)?"


def test_the_page_shows_what_its_commands_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(SAMPLES)
    page = PAGE.read_text()
    drawn = draw_page(page)
    assert page.count("$ ronde plan") >= 6
    shown, printed = (
        re.sub(r"[ -]+", " ", re.sub(NUMBER, "0", text)) for text in (page, drawn)
    )
    assert printed == shown, "type: python -m scripts.plan_page"
    pairs = zip(re.findall(NUMBER, page), re.findall(NUMBER, drawn), strict=True)
    for a, b in pairs:
        number = float(a.replace(",", ""))
        assert float(b.replace(",", "")) == pytest.approx(number, rel=0.02, abs=0.02)


def test_the_cluster_file_is_that_of_the_page() -> None:
    [shown] = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown == (SAMPLES / "cluster.toml").read_text()
