"""Check the records that the ranks of ``elastic_faults.py`` wrote.

Every sample counted once in each epoch, and all ranks have the weights of one process
that applies the same shares of the same batches in the same order, to the last bit.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from tests import ledger
from tests.ledger import Entry
from tests.soak.elastic_rank import (
    BATCH,
    NUM_SAMPLES,
    Momentum,
    checksum,
    loss_of,
    make_model,
    make_samples,
    rounded,
)


class Mark(NamedTuple):
    """A member had applied a step, or has come into a view."""

    at_s: float
    member: int
    view: int
    step: int  # of a view: how many steps were applied at its beginning
    checksum: int
    members: tuple[tuple[int, str, int], ...] = ()  # number, host and slot, by rank
    is_view: bool = False
    is_end: bool = False


def parse_mark(line: str, member: int) -> Mark:
    """Parse a line of a rank's progress."""
    kind, at_s, view, *values = json.loads(line)
    if kind == "view":
        members, step, digest = values
        own = tuple((number, host, slot) for number, host, slot in members)
        return Mark(at_s, member, view, step, digest, own, is_view=True)
    step, digest = values
    return Mark(at_s, member, view, step, digest, is_end=kind == "end")


def read_marks(folder: Path) -> list[Mark]:
    """Return the progress of all ranks, by time."""
    marks: list[Mark] = []
    for path in folder.glob("progress-*"):
        *lines, _cut_off = path.read_text().split("\n")
        number = int(path.name.rpartition("-")[2])
        marks += (parse_mark(line, number) for line in lines)
    return sorted(marks)


def find_undone(marks: Sequence[Mark]) -> dict[int, int]:
    """Return of each view the first step that a later one undoes."""
    begins = {mark.view: mark.step for mark in marks if mark.is_view}
    undone_from: dict[int, int] = {}
    least = sys.maxsize
    for view in sorted(begins, reverse=True):
        undone_from[view] = least
        least = min(least, begins[view])
    return undone_from


def applied_for_good(
    entries: Sequence[Entry], marks: Sequence[Mark], *, is_divided: bool
) -> tuple[list[Entry], list[str]]:
    """Return the entries without applied steps that were lost with all their ranks.

    A view that begins at a step undoes those from it on. Only ranks that are lost may
    have applied one of them, unless the optimizer's state is divided.
    """
    latest: dict[int, int] = defaultdict(lambda: -1)
    for mark in marks:
        if not (mark.is_view or mark.is_end):
            latest[mark.member] = max(latest[mark.member], mark.view)
    undone_from = find_undone(marks)
    kept: list[Entry] = []
    wrong: list[str] = []
    for entry in entries:
        is_undone = entry.is_applied and entry.step >= undone_from[entry.view]
        if is_undone and latest[entry.member] > entry.view and not is_divided:
            wrong.append(
                f"step {entry.step} of view {entry.view} was undone, but process "
                f"{entry.member} had applied it and went on"
            )
        kept.append(entry._replace(is_applied=False) if is_undone else entry)
    return kept, wrong


def replay(entries: Sequence[Entry]) -> tuple[list[int], int]:
    """Train as one process; return the weights' checksum after each step.

    Then the number of steps that the entries have.
    """
    torch.set_num_threads(1)
    shares: dict[int, dict[tuple[int, int], dict[int, Entry]]] = defaultdict(dict)
    good: dict[int, tuple[int, int]] = {}
    for entry in entries:
        key = entry.view, entry.attempt
        shares[entry.step].setdefault(key, {})[entry.member] = entry
        if entry.is_applied:
            good[entry.step] = key
    model = make_model()
    optimizer = Momentum(model.parameters())
    inputs, targets = make_samples()
    parameters = list(model.parameters())
    found: list[int] = []
    while (step := len(found)) in good:
        members = shares[step][good[step]].values()
        size = len(members)
        totals = [torch.zeros_like(p) for p in parameters]
        for entry in members:
            if not entry.ids:
                continue
            model.zero_grad(set_to_none=True)
            chosen = list(entry.ids)
            loss_of(model, inputs[chosen], targets[chosen]).backward()
            weight = len(chosen) * size / entry.batch_size
            for parameter, total in zip(parameters, totals, strict=True):
                gradient = cast("torch.Tensor", parameter.grad)
                weighted = gradient * weight if weight != 1.0 else gradient
                total.add_(rounded(weighted, size) * (1.0 / size))
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total
        optimizer.step()
        found.append(checksum(model))
    return found, max(shares, default=-1) + 1


def problems_of(folder: Path, *, is_divided: bool = False) -> list[str]:
    """Return the faults of a training that has ended, as sentences."""
    marks = read_marks(folder)
    ends = [mark for mark in marks if mark.is_end]
    if not ends:
        return ["no rank has reached the end"]
    entries, wrong = applied_for_good(
        ledger.read(folder.glob("ledger-*")), marks, is_divided=is_divided
    )
    num_epochs = max((e.epoch for e in entries), default=-1) + 1
    wrong += ledger.problems_of(entries, NUM_SAMPLES, num_epochs, batch_size=BATCH)
    expected, num_steps = replay(entries)
    if {mark.step for mark in ends} != {num_steps}:
        wrong.append(f"ranks end after steps {[m.step for m in ends]} of {num_steps}")
    undone_from = find_undone(marks)
    for mark in marks:
        last = mark.step if not (mark.is_view or mark.is_end) else mark.step - 1
        is_good = last < 0 or (last < len(expected) and expected[last] == mark.checksum)
        # What was undone had weights of its own: a step, or the beginning of a view
        # whose shares were lost with their copies.
        is_undone = is_divided and last >= undone_from[mark.view]
        if not (is_good or is_undone) and (mark.is_end or mark.is_view):
            moment = "at the end" if mark.is_end else f"at the beginning of {mark.view}"
            wrong.append(f"process {mark.member} has other weights {moment}")
    return wrong
