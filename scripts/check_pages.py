"""Makes docs/checks.md from the checks' own texts."""

from pathlib import Path

from ronde.check.catalogue import all_checks
from ronde.render.check import draw_page

if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "checks.md"
    page.write_text(draw_page(all_checks()), encoding="utf-8")
