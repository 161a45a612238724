"""Figures of faults: a table for people, and JSON for programs."""

import json
import math
import signal
import statistics
from collections.abc import Mapping, Sequence


def show(
    benchmark: str,
    seconds: Mapping[str, Sequence[float]],
    wrong: Mapping[str, Sequence[str]],
    **more: object,
) -> bool:
    """Print a row for each fault and for all of them; return True if none is wrong."""
    everything = [second for each in seconds.values() for second in each]
    rows: list[dict[str, object]] = []
    print(
        f"{'fault':58} {'runs':>5} {'wrong':>5} {'p50 s':>7} {'p95 s':>7} {'max s':>7}"
    )
    for name, each in (*seconds.items(), ("all", everything)):
        ordered = sorted(each) or [math.nan]
        p50, p95 = (
            statistics.median(ordered),
            ordered[math.ceil(0.95 * len(ordered)) - 1],
        )
        texts, worst = wrong.get(name, ()), ordered[-1]
        figures = f"{p50:7.2f} {p95:7.2f} {worst:7.2f}"
        print(f"{name:58} {len(each):5} {len(texts):5} {figures}")
        for text in texts:
            print(f"  wrong: {text}")
        row = {"fault": name, "runs": len(each), "wrong": len(texts)}
        times = {"p50_s": p50, "p95_s": p95, "max_s": worst}
        rows.append(row | {key: round(value, 3) for key, value in times.items()})
    print(json.dumps({"benchmark": benchmark, "rows": rows, **more}))
    return not any(wrong.values())


def reset_signals() -> None:
    """Handle signals that ``nohup`` or a shell's ``&`` ignores, for the jobs' sake."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
