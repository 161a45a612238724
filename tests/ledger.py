"""What each rank did, and a check that every sample counted exactly once.

A rank writes an entry before each attempt at a step, and another one after the step was
applied: a rank that is lost in between has given its gradient all the same. Nothing in
here knows how samples are dealt.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """One rank's part of one attempt at a step."""

    member: int  # of the rank's process, for good
    view: int
    attempt: int  # at this step, in this view
    step: int  # of the job, from 0 on
    epoch: int
    batch_size: int  # of all ranks together
    ids: tuple[int, ...]
    is_applied: bool  # written after the step, not before it


def write(path: Path, entry: Entry) -> None:
    """Append an entry to a rank's ledger; a kill leaves whole lines, or a last part."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def read(paths: Iterable[Path]) -> list[Entry]:
    """Read the ledgers of all ranks; the last line of one may be cut off."""
    entries: list[Entry] = []
    for path in paths:
        *lines, _cut_off = path.read_text().split("\n")
        for line in lines:
            *fields, ids, is_applied = json.loads(line)
            entries.append(Entry(*fields, tuple(ids), is_applied))
    return entries


def problems_of(
    entries: Iterable[Entry],
    num_samples: int,
    num_epochs: int,
    *,
    batch_size: int | None = None,
    drop_last: bool = False,
) -> list[str]:
    """Return what is wrong, in words; nothing, if all samples counted exactly once.

    ``num_epochs`` must be complete; the ledger may end within one more. With a constant
    ``batch_size`` all batches but an epoch's last must have it, and with ``drop_last``
    fewer samples than that may be left out of an epoch.
    """
    attempts: dict[int, dict[tuple[int, int], list[Entry]]] = defaultdict(dict)
    for entry in entries:
        key = (entry.view, entry.attempt)
        attempts[entry.step].setdefault(key, []).append(entry)
    newest = max(attempts, default=-1)
    missing = sorted(set(range(newest + 1)) - set(attempts))
    problems = [f"step {step} is missing" for step in missing]
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    batches: dict[int, list[int]] = defaultdict(list)
    last = (0, 0)
    for step, tried in sorted(attempts.items()):
        applied = [own for own in tried.values() if any(e.is_applied for e in own)]
        if len(applied) != 1 and (applied or step != newest):  # it may be under way
            problems.append(f"step {step} was applied {len(applied)} times")
        for own in applied[:1]:
            first = own[0]
            problems += _problems_of_attempt(own)
            if first.view < last[0] or first.epoch not in (last[1], last[1] + 1):
                problems.append(f"step {step} goes back or too far: {first}")
            last = first.view, first.epoch
            shares = {entry.member: entry.ids for entry in own}
            counts[first.epoch].update(i for ids in shares.values() for i in ids)
            batches[first.epoch].append(first.batch_size)
    for epoch in range(max(num_epochs, last[1] + 1)):
        lost = sorted(set(range(num_samples)) - set(counts[epoch]))
        num_spared = (batch_size or num_samples) - 1 if drop_last else 0
        if epoch < num_epochs and len(lost) > num_spared:
            problems.append(f"epoch {epoch} lacks samples {lost}")
        wrong = sorted(i for i, n in counts[epoch].items() if n > 1 or i >= num_samples)
        if wrong:
            problems.append(f"epoch {epoch} has samples {wrong} twice, or of no data")
        *full, rest = batches[epoch] or [0]
        if batch_size and ({*full} - {batch_size} or rest > batch_size):
            problems.append(f"epoch {epoch} has batches of {[*full, rest]}")
    return problems


def _problems_of_attempt(entries: list[Entry]) -> list[str]:
    """Return what is wrong with one attempt: entries of the same view and step."""
    where = f"step {entries[0].step} in view {entries[0].view}"
    shares = {(entry.member, entry.ids) for entry in entries}
    total = sum(len(ids) for _, ids in shares)
    problems: list[str] = []
    if len(shares) != len({entry.member for entry in entries}):
        problems.append(f"{where}: a member's share has changed")
    if len({(entry.epoch, entry.batch_size) for entry in entries}) > 1:
        problems.append(f"{where}: ranks differ in epoch or batch")
    if total != entries[0].batch_size:
        problems.append(f"{where}: {total} samples of {entries[0].batch_size}")
    return problems
