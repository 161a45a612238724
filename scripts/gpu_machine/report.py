"""The folder of reports: written anew after every part."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from scripts.gpu_machine.parts import Part
from scripts.gpu_machine.running import Outcome, Result

FILES = ("report.md", "summary.json", "records.jsonl")
LOGS = ("facts", "tests", "tools", "benchmarks")
Values = Mapping[str, Any]


class Report:
    """Gathers the results of the parts.

    Args:
        folder: Made where it is missing; reports of an earlier run in it are removed.
        is_rehearsal: Whether the CPU stands for GPUs.

    Attributes:
        folder: As given.
        facts: What machine it is; empty before the first part.
    """

    def __init__(self, folder: Path, *, is_rehearsal: bool) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self._is_rehearsal = is_rehearsal
        self._outcomes: list[Outcome] = []
        self._records: list[dict[str, Any]] = []
        self._tests: dict[str, list[dict[str, Any]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*FILES, *(f"{log}.log" for log in LOGS)):
            (folder / name).unlink(missing_ok=True)

    @property
    def is_passed(self) -> bool:
        return all(each.result is Result.PASSED for each in self._outcomes)

    def add(self, part: Part, outcome: Outcome) -> None:
        """Take a part's result, records and tests in, and write all files."""
        self._outcomes.append(outcome)
        if part.junit and Path(part.junit).exists():
            self._tests[part.name] = list(_read_junit(Path(part.junit)))
        if part.records and Path(part.records).exists():
            lines = Path(part.records).read_text().splitlines()
            records = [json.loads(line) for line in lines if line.endswith("}")]
            self.facts |= next(
                (each["values"] for each in records if each["kind"] == "facts"), {}
            )
            self._records += [each for each in records if each["kind"] != "facts"]
        self._write()

    def _write(self) -> None:
        summary = {
            "is_passed": self.is_passed,
            "is_rehearsal": self._is_rehearsal,
            "facts": self.facts,
            "parts": [
                {"name": o.name, "result": o.result, "seconds": o.seconds}
                | ({"words": o.words} if o.words else {})
                | ({"tests": self._tests[o.name]} if o.name in self._tests else {})
                for o in self._outcomes
            ],
        }
        texts = (
            "\n".join(self._lines()) + "\n",
            json.dumps(summary, indent=1) + "\n",
            "".join(json.dumps(record) + "\n" for record in self._records),
        )
        for name, text in zip(FILES, texts, strict=True):
            (self.folder / name).write_text(text)

    def _lines(self) -> Iterator[str]:
        yield "# ronde on " + (
            "the CPU, as a rehearsal" if self._is_rehearsal else "GPUs"
        )
        yield ""
        names = Counter(gpu["name"] for gpu in self.facts.get("gpus", ()))
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
        keys = ("driver", "torch", "cuda", "nccl", "cudnn", "python", "num_cores")
        lines = [f"{key} {self.facts[key]}" for key in keys if self.facts.get(key)]
        yield f"- GPUs: {gpus or 'none'}"
        yield f"- {', '.join(lines)}"
        for name, why in self.facts.get("missing", {}).items():
            yield f"- missing: {name}: {why}"
        rows = [
            (o.name, o.result, f"{o.seconds:.1f}", self._summary(o))
            for o in self._outcomes
        ]
        yield from _table(("part", "result", "s", ""), rows)
        yield ""
        for name, tests in self._tests.items():
            for test in tests:
                if test["result"] in ("failure", "error"):
                    yield f"- {name}: {test['name']}: {_cell(test['words'])}"
            reasons = Counter(t["words"] for t in tests if t["result"] == "skipped")
            for reason, count in reasons.items():
                yield f"- {name}: {count} skipped: {_cell(reason)}"
        try:
            figures = list(_figures(self._records))
        except (KeyError, TypeError, ValueError) as error:
            # The parts that are still to come count for more than these tables.
            figures = ["", f"records.jsonl cannot be drawn: {error!r}"]
        yield from figures

    def _summary(self, outcome: Outcome) -> str:
        """Return a part's summary; of tests the number of each outcome."""
        if outcome.name not in self._tests:
            return outcome.words
        counts = Counter(test["result"] for test in self._tests[outcome.name])
        return ", ".join(f"{count} {result}" for result, count in counts.items())


def _read_junit(path: Path) -> Iterator[dict[str, Any]]:
    try:
        tree = ET.parse(path)  # noqa: S314  our own file
    except ET.ParseError:  # what wrote it was killed
        return
    for case in tree.iter("testcase"):
        ends = [each for each in case if each.tag in ("failure", "error", "skipped")]
        test = {
            "name": f"{case.get('classname')}::{case.get('name')}",
            "seconds": float(case.get("time", "0")),
            "result": ends[0].tag if ends else "passed",
        }
        if ends:
            test["words"] = ends[0].get("message", "")[:1000]
        yield test


def _figures(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return the tables of all that was measured."""
    by_kind: dict[str, list[Values]] = {}
    for record in records:
        by_kind.setdefault(record["kind"], []).append(record["values"])
    for values in by_kind.get("training_step", ()):
        rows = [
            (variant, f"{ms:.3f}", " ".join(f"{q:.3f}" for q in quartiles))
            for variant, ms in values["median_step_ms"].items()
            for quartiles in [values["ratio_to_ronde_quartiles"][variant]]
        ]
        yield from _title(f"A step of {values['model']}, {values['num_ranks']} ranks")
        yield from _table(("variant", "ms", "time / ronde's: quartiles"), rows)
    for values in by_kind.get("bench", ()):
        ranks = values["ranks"]["value"]
        limit = values["facts"].get("limit_busbw_gb_per_s")
        yield from _title(f"{values['test']}, {ranks} ranks, {values['engine']}")
        yield f"bound of busbw: {f'{limit:.1f} GB/s' if limit else 'not known'}"
        rows = [
            (
                str(row["size_bytes"]),
                *_times(row, "out_of_place"),
                *_times(row, "in_place"),
            )
            for row in values["rows"]
        ]
        heads = ("bytes", "out of place, us", "busbw", "in place, us", "busbw")
        yield from _table(heads, rows)
    rows = [
        (
            values["model"], f"{values['dtype']}, batch {values['batch_a_rank']}",
            str(values["num_ranks"]), name, f"{variant['step_ms']:.2f}",
            f"{variant['units_per_s']:.0f} {values['unit']}",
        )
        for values in by_kind.get("bench_train", ())
        for name, variant in values["variants"].items()
    ]  # fmt: skip
    if rows:
        yield from _title("Training steps")
        yield from _table(("model", "", "ranks", "variant", "ms", "a second"), rows)


def _times(row: Values, place: str) -> tuple[str, str]:
    cell = row[place]
    if cell is None:
        return "-", "-"
    return f"{cell['time_us']:.1f}", f"{cell['busbw_gb_per_s']:.2f}"


def _title(text: str) -> list[str]:
    return ["", f"## {text}"]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Return a text as it fits a line of a table."""
    return " ".join(text.split()).replace("|", "\\|")[:300]
