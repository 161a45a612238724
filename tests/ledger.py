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
    missing = sorted(set(range(max(attempts, default=-1) + 1)) - set(attempts))
    problems = [f"step {step} is missing" for step in missing]
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    batches: dict[int, list[int]] = defaultdict(list)
    last_view = last_epoch = 0
    for step in sorted(attempts):
        applied = [k for k, e in attempts[step].items() if any(x.is_applied for x in e)]
        if len(applied) != 1:
            if applied or step != max(attempts):  # the last may be under way
                problems.append(f"step {step} was applied {len(applied)} times")
            if not applied:
                continue
        view, attempt = applied[0]
        own = attempts[step][applied[0]]
        problems += _problems_of_attempt(own, f"step {step} in view {view}")
        shares = {entry.member: entry.ids for entry in own}
        if view < last_view or own[0].epoch not in (last_epoch, last_epoch + 1):
            problems.append(f"step {step} goes back in view or epoch: {own[0]}")
        last_view, last_epoch = view, own[0].epoch
        counts[own[0].epoch].update(i for ids in shares.values() for i in ids)
        batches[own[0].epoch].append(own[0].batch_size)
    for epoch in range(max(num_epochs, max(counts, default=0) + 1)):
        is_complete = epoch < num_epochs
        problems += _problems_of_epoch(
            epoch, counts[epoch], num_samples if is_complete else None, drop_last
        )
        full, last = batches[epoch][:-1], batches[epoch][-1:]
        wrong = [size for size in full if batch_size not in (None, size)]
        if batch_size is not None and max([*wrong, *last, 0]) > batch_size or wrong:
            problems.append(f"epoch {epoch} has batches of {wrong + last}")
    return problems


def _problems_of_attempt(entries: list[Entry], where: str) -> list[str]:
    problems: list[str] = []
    shares: dict[int, tuple[int, ...]] = {}
    for entry in entries:
        if shares.setdefault(entry.member, entry.ids) != entry.ids:
            problems.append(f"{where}: member {entry.member} changed its share")
    if len({(entry.epoch, entry.batch_size) for entry in entries}) > 1:
        problems.append(f"{where}: ranks differ in epoch or batch")
    total = sum(map(len, shares.values()))
    if total != entries[0].batch_size:
        problems.append(f"{where}: {total} samples of {entries[0].batch_size}")
    return problems


def _problems_of_epoch(
    epoch: int, counts: Counter[int], num_samples: int | None, drop_last: bool
) -> list[str]:
    twice = sorted(sample for sample, count in counts.items() if count > 1)
    problems = [f"epoch {epoch} has samples {twice} twice"] if twice else []
    if num_samples is not None:
        lost = sorted(set(range(num_samples)) - set(counts))
        strange = sorted(set(counts) - set(range(num_samples)))
        if strange or (lost and not drop_last):
            problems.append(f"epoch {epoch} lacks {lost}, and has {strange} besides")
    return problems
