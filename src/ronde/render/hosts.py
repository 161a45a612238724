"""Format hosts as text that ``ronde.launch`` reads."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ronde.launch.host import SLOTS_OPEN, Host

_NUMBERS = re.compile(r"([0-9]+)")
_MAX_DIGITS = 9


def fold_hosts(names: Iterable[str], most: int = 1 << 16) -> str:
    """Format host names in their order as ``-H`` reads them: ``node[1-2,4-64], login``.

    Names that differ in a single number share brackets. After ``most`` ranges only the
    number of remaining hosts is shown.
    """
    parts = [_NUMBERS.split(name) for name in dict.fromkeys(names)]
    varying = _varying_numbers(parts)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for part in parts:
        index = varying[tuple(part[::2])]
        is_literal = any(mark in text for text in part[::2] for mark in "[]:, \t")
        # Addresses do not count up, and brackets cannot be nested.
        if not index or len(part[index]) > _MAX_DIGITS or is_literal:
            groups["".join(part), "", ""] = []
            continue
        before, behind = "".join(part[:index]), "".join(part[index + 1 :])
        groups.setdefault((before, "[]", behind), []).append(part[index])
    words: list[str] = []
    num_left = 0
    for (before, brackets, behind), numbers in groups.items():
        runs = list(_runs(numbers)) if brackets else [("", 1)]
        shown = runs[: max(0, most)]
        most -= len(shown)
        num_left += sum(num_hosts for _, num_hosts in runs[len(shown) :])
        inner = ",".join(text for text, _ in shown)
        if shown:
            is_one = len(numbers) <= 1
            words.append(f"{before}{inner if is_one else f'[{inner}]'}{behind}")
    return ", ".join(words) + (f" and {num_left} more" if num_left else "")


def _varying_numbers(parts: list[list[str]]) -> dict[tuple[str, ...], int]:
    """Return the index of the last varying number, or 0, for each kind of name.

    Names are of one kind if the text between their numbers is equal; it is the key.
    """
    alike: dict[tuple[str, ...], list[list[str]]] = {}
    for part in parts:
        alike.setdefault(tuple(part[::2]), []).append(part)
    return {
        words: max(
            (n for n in range(1, len(same[0]), 2) if len({p[n] for p in same}) > 1),
            default=0,
        )
        for words, same in alike.items()
    }


def _runs(numbers: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield ranges such as ``04-64``, each with the count of its numbers."""
    ordered = sorted(numbers, key=lambda text: (int(text), len(text)))
    first, count = ordered[0], 1
    for text in [*ordered[1:], ""]:
        if text and text == f"{int(first) + count:0{len(first)}d}":
            count += 1
            continue
        last = f"{int(first) + count - 1:0{len(first)}d}"
        yield first if count == 1 else f"{first}-{last}", count
        first, count = text, 1


def write_hostfile(hosts: Sequence[Host]) -> str:
    """Format a host file; without hosts, a comment, which ``ronde run`` refuses."""
    if not hosts:
        return "# no host is ready\n"
    text = ""
    for host in hosts:
        facts = {
            "slots": "" if host.slots == SLOTS_OPEN else host.slots,
            "user": host.user,
            "port": host.port or "",
            "addr": host.address,
            "gpus": ",".join(host.gpus),
        }
        words = [f"[{host.name}]" if ":" in host.name else host.name]
        words += [f"{name}={value}" for name, value in facts.items() if value != ""]
        text += f"{' '.join(words)}\n"
    return text
