"""What ``nvidia-smi``, its ``-L`` and ``nvlink -s`` and ``-R`` say of each GPU."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ronde.topology.probes.pci_kinds import plain_address
from ronde.topology.probes.refusals import bad_value

_GPU = re.compile(r"\s*GPU ([0-9]{1,3}):\s*(\S.*)")
_LINK = re.compile(r"\s*Link ([0-9]{1,3}):\s*(\S.*)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,6})?) GB/s")
_REMOTE = re.compile(r"Remote Device (\S{1,32}): Link [0-9]{1,3}")
_INACTIVE = re.compile(r"<inactive>")
_SUMMARY = re.compile(
    r"\|\s*([0-9]{1,3})\s+(\S.{0,60}?)\s+(?:On|Off|N/A)\s*\|\s*([0-9A-Fa-f:.]{7,16})\s.*"
)
_MAX_LINE = 400


class SmiGpu(NamedTuple):
    """What is told of a GPU.

    Attributes:
        title: Of its model; empty where not told.
        uuid: ``GPU-...``; empty where not told.
        bus_id: Empty where not told.
        rates: GB/s at which each of its active NVLinks signals.
        remotes: Addresses that NVLinks lead to, and how many lead there.
    """

    title: str = ""
    uuid: str = ""
    bus_id: str = ""
    rates: tuple[float, ...] = ()
    remotes: tuple[tuple[str, int], ...] = ()


def is_of_gpu(line: str) -> bool:
    """Return whether a line names a GPU or tells of one of its links."""
    if match := _GPU.fullmatch(line):
        return "(UUID: " in match[2]
    match = _LINK.fullmatch(line)
    return match is not None and any(
        form.fullmatch(match[2]) for form in (_RATE, _REMOTE, _INACTIVE)
    )


def read_gpus(lines: Sequence[str], origin: str) -> dict[int, SmiGpu]:
    """Return what is told of each GPU, by number.

    Raises:
        UsageError: A line of a link is cut, or stands below no GPU.
    """
    found: dict[int, SmiGpu] = {}
    sections: list[_Section] = []
    for line_number, line in enumerate(lines, 1):
        if match := _GPU.fullmatch(line):
            number = int(match[1])
            found[number] = _named(found.get(number, SmiGpu()), match[2])
            sections.append(_Section(number, [], []))
        elif match := _LINK.fullmatch(line):
            if not (sections and sections[-1].take(match[2])):
                raise bad_value(
                    origin,
                    line_number,
                    "a link must stand below its GPU, with a rate or a remote device",
                    line.strip(),
                )
        elif match := _SUMMARY.fullmatch(line) if len(line) < _MAX_LINE else None:
            number = int(match[1])
            each = found.get(number, SmiGpu())
            address = plain_address(match[3])
            found[number] = each._replace(title=each.title or match[2], bus_id=address)
    for section in sections:
        found[section.number] = section.added_to(found[section.number])
    return found


class _Section(NamedTuple):
    """What stands below a GPU: rates or remote devices of its links."""

    number: int
    rates: list[float]
    remotes: list[str]

    def take(self, text: str) -> bool:
        """Note what is said of a link; return false where it is cut."""
        if match := _RATE.fullmatch(text):
            self.rates.append(float(match[1]))
        elif match := _REMOTE.fullmatch(text):
            self.remotes.append(plain_address(match[1]))
            return bool(self.remotes[-1])
        else:
            is_cut = text[0] in "<0123456789" or text.startswith("Remote")
            return bool(_INACTIVE.fullmatch(text)) or not is_cut
        return True

    def added_to(self, gpu: SmiGpu) -> SmiGpu:
        """Return a GPU with what is told here in place of what was told before."""
        return gpu._replace(
            rates=tuple(self.rates) or gpu.rates,
            remotes=tuple(Counter(self.remotes).items()) or gpu.remotes,
        )


def _named(gpu: SmiGpu, text: str) -> SmiGpu:
    title, _, rest = text.partition(" (UUID: ")
    return gpu._replace(title=title.strip(), uuid=rest.rstrip(") ") or gpu.uuid)
