"""How far a benchmark is, in one line that is overwritten."""

from ronde.bench.measured import Totals
from ronde.units import format_duration

_BAR = 24


def progress_text(totals: Totals, num_rows: int, elapsed_s: float, cycle: int) -> str:
    """Return the line.

    Args:
        totals: Of all rows so far.
        num_rows: Rows that there will be; 0 for a soak, which has no end.
        elapsed_s: Since the first row was begun.
        cycle: Number of the sweep, from 0 on.
    """
    parts: list[str] = []
    if num_rows:
        filled = _BAR * totals.num_rows // num_rows
        bar = "#" * filled + "-" * (_BAR - filled)
        parts.append(f"[{bar}] {totals.num_rows}/{num_rows} rows")
    else:
        parts.append(f"soak: cycle {cycle + 1}, {totals.num_rows} rows")
    parts.append(format_duration(elapsed_s))
    if totals.peak_busbw_gb_per_s:
        parts.append(f"peak {totals.peak_busbw_gb_per_s:.2f} GB/s")
    if totals.is_checked:
        parts.append(f"{totals.num_wrong:g} wrong")
    return ", ".join(parts)
