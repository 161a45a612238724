"""Draw docs/img/top-8.svg and top-512.svg, the screen of ``ronde top``.

Type: python -m scripts.top_pictures
"""

import asyncio
import re
import time
from pathlib import Path

from tests.monitor.jobs import make_watcher

from ronde.cli import JobScreen

IMAGES = Path(__file__).parents[1] / "docs/img"
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they are of another site


async def draw(num_ranks: int, late: int, rows: int) -> str:
    view = make_watcher(num_ranks, late=late).view()
    job = view.job._replace(started_at=time.time() - 754.0)
    ranks = [
        each if each.rank == late else each._replace(collective="gradients.0")
        for each in view.ranks
    ]
    tokens_per_s = 21_350.0 * num_ranks
    view = view._replace(job=job, ranks=tuple(ranks), tokens_per_s=tokens_per_s)
    screen = JobScreen([view], str)
    async with screen.run_test(size=(80, rows)) as pilot:
        while not screen.over:
            await pilot.pause(0.01)
        screen.over = ""
        screen.on_resize()
        await pilot.pause()
        text = screen.export_screenshot(title="ronde top")
    text = _FONT.sub("", text).replace("Fira Code", "monospace")
    return "".join(line + "\n" for line in text.splitlines() if line.strip())


def main() -> None:
    for num_ranks, late, rows in ((8, 5, 32), (512, 77, 24)):
        text = asyncio.run(draw(num_ranks, late, rows))
        (IMAGES / f"top-{num_ranks}.svg").write_text(text)


if __name__ == "__main__":
    main()
