"""Read nvidia-smi's tables and lists about topology, as users save and paste them.

A file may have several outputs, with shell prompts between them. In pasted text, tabs
become blanks, columns touch, and escape sequences of the underlined header remain.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ronde.errors import UsageError
from ronde.topology.cpu_sets import MAX_CPU, format_list, members, parse_list
from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    Relation,
    Topology,
)
from ronde.topology.pci import compute_capability
from ronde.topology.probes.base import (
    Probe,
    Saved,
    bad_value,
    first_lines,
    lines_of_one,
)
from ronde.topology.probes.nvml import payload_gb_per_s

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOOKED_AT = 1 << 18
_MAX_REMARKS = 50
# No GPU has more NVLinks.
_MAX_LINKS = 18

_GPU_NAME = re.compile(r"GPU(0|[1-9][0-9]{0,2})")
_PATHS = r"NV[0-9]{1,3}|NODE|PIX|PXB|PHB|SYS"
_PEERS = r"OK|CNS|GNS|TNS|NS|DR|U"
_WORD = re.compile(rf"X|{_PATHS}|{_PEERS}")
_WORDS = re.compile(rf"(?:{_WORD.pattern})+")
_PEER = re.compile(_PEERS)
_BONDED = re.compile(r"NV([0-9]+)")
_WITHIN_NODE = ("PIX", "PXB", "PHB", "NODE")
_MISSING = ("N/A", "-", "ERR!")
_COLUMN = re.compile(r"[A-Za-z][\w.:+-]{0,63}")
_GROWN = re.compile(r"(?<=[0-9])(?=(?:GPU|NIC|mlx)[0-9])")
_HEADING = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S{1,64})\s*")

# The legend of ``topo -mp``, which leaves NVLinks out, has no ``NV#``.
_LEGEND_OF_MATRIX = re.compile(r"\s*(Legend:|NV#).*")

_GPU = re.compile(r"\s*GPU ([0-9]{1,3}):\s*(\S.*)")
_LINK = re.compile(r"\s*Link ([0-9]{1,3}):\s*(\S.*)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,6})?) GB/s")
_INACTIVE = "<inactive>"
# All links are down, as in MIG mode.
_OF_ALL_LINKS = re.compile(
    r"\s*(?:.*(?i:NVLink information as all links are inactive)|(MIG) .*\(UUID: MIG-.*)"
)


def _recognises(saved: Saved) -> bool:
    lines = first_lines(_plain(saved.text[:_LOOKED_AT]))
    return any(_columns(line) or _is_of_gpu(line) for line in lines)


def _read(saved: Saved) -> Topology:
    reader = _Reader(saved.name)
    lines = lines_of_one(_plain(saved.text).splitlines(), saved.name)
    for number, line in enumerate(lines, 1):
        reader.feed(number, line)
    return Topology((reader.host(f"nvidia-smi topo -m {saved.name}"),))


def _plain(text: str) -> str:
    """Return text without escape sequences and trailing blanks of lines."""
    plain = _ESCAPE.sub("", text)
    return "\n".join(line.rstrip() for line in plain.splitlines())


def _columns(line: str) -> list[str]:
    """Return the columns of a matrix's header; [] for any other line."""
    if "GPU" not in line:
        return []
    heading = _HEADING.search(line)
    columns = _GROWN.sub(" ", line[: heading.start() if heading else None]).split()
    are_names = all(
        _COLUMN.fullmatch(name)
        and not _WORDS.fullmatch(name)
        and (heading or name[-1].isdecimal())
        for name in columns
    )
    return columns if are_names and columns and _GPU_NAME.fullmatch(columns[0]) else []


def _is_of_gpu(line: str) -> bool:
    if match := _GPU.fullmatch(line):
        return "(UUID: " in match[2]
    match = _LINK.fullmatch(line)
    return match is not None and _link_rate(match[2]) is not None


def _link_rate(text: str) -> float | None:
    """Return a link's signalling rate in GB/s; 0 if inactive, None if not shown."""
    match = _RATE.fullmatch(text)
    return float(match[1]) if match else 0.0 if text == _INACTIVE else None


@dataclass(slots=True)
class _Gpu:
    title: str = ""
    uuid: str = ""
    # GB/s at which each active link signals, by its number.
    rates: dict[str, float] = field(default_factory=dict[str, float])
    # The list of its links; ends of links that are down, and in MIG mode, are unknown.
    is_listed: bool = False
    has_mig: bool = False


class _Reader:
    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._remarks: list[str] = []
        self._gpus: defaultdict[int, _Gpu] = defaultdict(_Gpu)
        self._below: _Gpu | None = None  # The GPU of the next links.
        self._legend: dict[str, str] = {}
        self._explained: set[str] = set()
        self._ports: dict[str, None] = {}  # Names of columns that are no GPUs.
        # Path and access by the names of both, each pair once; empty if unknown.
        self._pairs: dict[tuple[str, str], list[str]] = {}
        # Of each GPU, as bits: CPUs and NUMA nodes near it, nodes of its own memory.
        self._lists_of: dict[str, list[int]] = {}
        self._header = 0  # Its line, columns and headings.
        self._columns: dict[str, int] = {}
        self._headings: list[str] = []
        self._rows: set[str] = set()

    def feed(self, number: int, line: str) -> None:
        words = line.split(maxsplit=2)
        name = words[0] if words else ""
        # A second header begins like a row.
        is_row = name in self._columns and name not in self._rows
        if is_row and not (len(words) > 1 and words[1] in self._columns):
            self._on_row(number, line, name)
        elif columns := _columns(line):
            self._begin_matrix(number, line, columns)
        elif match := _GPU.fullmatch(line):
            self._on_gpu(number, match)
        elif match := _LINK.fullmatch(line):
            self._on_link(number, line, match)
        elif self._below and (match := _OF_ALL_LINKS.fullmatch(line)):
            self._below.is_listed = True
            self._below.has_mig |= bool(match[1])
        elif match := _LEGEND_OF_MATRIX.fullmatch(line):
            self._explained.add(match[1])
        elif match := _LEGEND.fullmatch(line):
            self._legend[match[1]] = match[2]

    def _on_gpu(self, number: int, match: re.Match[str]) -> None:
        gpu = self._below = self._gpus[int(match[1])]
        title, _, rest = match[2].partition(" (UUID: ")
        uuid, _, more = rest.partition(")")
        uuid = uuid or gpu.uuid
        if gpu.uuid not in ("", uuid):
            rule = f"GPU {match[1]} must have one UUID, of one host in a file"
            raise bad_value(self._origin, number, rule, uuid)
        gpu.title, gpu.uuid = title.strip(), uuid
        # Some drivers break no line here.
        gpu.is_listed |= _OF_ALL_LINKS.fullmatch(more) is not None

    def _on_link(self, number: int, line: str, match: re.Match[str]) -> None:
        rate = _link_rate(match[2])
        if self._below is None or (rate is None and match[2][0] in "<0123456789"):
            rule = "a link must stand below its GPU, with its rate"
            raise bad_value(self._origin, number, rule, line.strip())
        # Other facts about a link do not show its state.
        self._below.is_listed |= rate is not None
        if rate:
            self._below.rates[match[1]] = rate

    def _begin_matrix(self, number: int, line: str, columns: list[str]) -> None:
        self._end_matrix()
        self._header, self._rows = number, set()
        self._columns = {name: index for index, name in enumerate(columns)}
        if len(self._columns) != len(columns):
            rule = "columns must be different"
            raise bad_value(self._origin, number, rule, line)
        self._headings = [match[0].split()[0] for match in _HEADING.finditer(line)]
        for name in columns:
            if match := _GPU_NAME.fullmatch(name):
                self._gpus[int(match[1])]  # Known from now on.
            else:
                self._ports[name] = None

    def _end_matrix(self) -> None:
        gpus = filter(_GPU_NAME.fullmatch, self._columns)
        if missing := [name for name in gpus if name not in self._rows]:
            rule = "a matrix must have a row for each GPU in its header"
            got = f"none for {', '.join(missing[:8])}"
            raise bad_value(self._origin, self._header, rule, got)

    def _on_row(self, number: int, line: str, name: str) -> None:
        words: list[str] = []
        rest = line[line.index(name) + len(name) :]
        tail = ""
        for match in re.finditer(r"\S+", rest):
            is_word = match[0] in _MISSING or _WORDS.fullmatch(match[0])
            if len(words) >= len(self._columns) or not is_word:
                tail = rest[match.start() :]
                break
            words += [""] if match[0] in _MISSING else _WORD.findall(match[0])
        if len(words) != len(self._columns) or words[self._columns[name]] != "X":
            rule = (
                f"the row of {name} must have {len(self._columns)} columns as the "
                f"header in line {self._header}, with X in its own"
            )
            raise bad_value(self._origin, number, rule, " ".join(words))
        self._rows.add(name)
        for other, word in zip(self._columns, words, strict=True):
            if word and other != name:
                self._on_word(name, other, word)
        if _GPU_NAME.fullmatch(name) and any(lists := self._lists(number, tail)):
            self._lists_of[name] = lists

    def _on_word(self, name: str, other: str, word: str) -> None:
        pair = (other, name) if (other, name) in self._pairs else (name, other)
        known = self._pairs.setdefault(pair, ["", ""])
        index = 1 if _PEER.fullmatch(word) else 0
        old = known[index]
        # ``topo -mp`` leaves NVLinks out: that is no contradiction.
        is_bonded, was_bonded = map(_BONDED.fullmatch, (word, old))
        if not old or (is_bonded and not was_bonded):
            known[index] = word
        elif old != word and (is_bonded or not was_bonded):
            remark = f"{pair[0]} and {pair[1]} are given as {old} and {word}."
            self._remarks.append(remark)

    def _lists(self, number: int, tail: str) -> list[int]:
        """Return the CPU, NUMA and GPU lists at the end of a row, as bits."""
        fields = tail.split()
        # Only an empty list of CPUs is left out; a list of CPUs may lack its node.
        is_list = len(self._headings) == 2 and ("-" in tail or "," in tail)
        if len(fields) == len(self._headings) - 1 and not is_list:
            fields.insert(0, "")
        found = dict(zip(self._headings, fields, strict=False))
        lists: list[int] = []
        for text in (found.get(heading, "") for heading in ("CPU", "NUMA", "GPU")):
            try:
                lists.append(0 if text in _MISSING else parse_list(text))
            except ValueError:
                rule = f"an affinity must be a list of numbers up to {MAX_CPU}"
                raise bad_value(self._origin, number, rule, text) from None
        return lists

    def host(self, source: str) -> HostTopology:
        self._end_matrix()
        if not self._gpus:
            raise UsageError(
                f"{self._origin} lists no GPUs. On a machine without GPUs or NVLinks, "
                "nvidia-smi topo -m prints no table."
            )
        cpus, homes = self._numa_nodes()
        nodes = self._port_nodes(homes)
        ports = {
            name: NetPort(self._legend.get(name, name), node=nodes.get(name, UNKNOWN))
            for name in self._ports
        }
        gpus = {
            f"GPU{number}": GpuDevice(
                "",
                number,
                sm=compute_capability(gpu.title),
                title=gpu.title,
                uuid=gpu.uuid,
                node=homes.get(f"GPU{number}", UNKNOWN),
                nvlinks=self._num_nvlinks(f"GPU{number}", gpu),
            )
            for number, gpu in sorted(self._gpus.items())
        }
        names = {name: each.name for name, each in (gpus | ports).items()}
        links = tuple(self._links(gpus, names))
        return HostTopology(
            sources=(source,),
            numa_nodes=tuple(
                NumaNode(n, tuple(members(bits))) for n, bits in sorted(cpus.items())
            ),
            gpus=tuple(gpus.values()),
            ports=tuple(ports.values()),
            links=links,
            relations=tuple(
                Relation(names[one], names[other], *words)
                for (one, other), words in self._pairs.items()
            ),
            remarks=tuple(dict.fromkeys(self._remarks))[:_MAX_REMARKS],
        )

    def _num_nvlinks(self, name: str, gpu: _Gpu) -> int:
        """Return the number of a GPU's NVLinks that are up, or ``UNKNOWN``."""
        if gpu.is_listed or gpu.has_mig:
            return UNKNOWN if gpu.has_mig else len(gpu.rates)
        words = [
            path
            for pair, (path, _) in self._pairs.items()
            if path and name in pair and all(map(_GPU_NAME.fullmatch, pair))
        ]
        has_none = words and not any(map(_BONDED.fullmatch, words))
        return 0 if has_none and self._explained != {"Legend:"} else UNKNOWN

    def _numa_nodes(self) -> tuple[dict[int, int], dict[str, int]]:
        """Return the CPUs of NUMA nodes as bits, and the node of each GPU by its name.

        If the output has no node numbers, each set of CPUs counts as a node.
        """
        lists = self._lists_of
        if not any(near for _, near, _ in lists.values()):
            lists = self._number_by_cpus()
        nodes: dict[int, int] = {}
        homes: dict[str, int] = {}
        for name, (cpus, near, own) in lists.items():
            nodes = dict.fromkeys(members(near | own), 0) | nodes
            if near:
                homes[name] = home = members(near)[0]
                nodes[home] |= cpus
            if near & (near - 1):
                self._remarks.append(
                    f"{name} is near the NUMA nodes {format_list(members(near))}: the "
                    f"CPUs {format_list(members(cpus))} are counted to the first."
                )
        return nodes, homes

    def _number_by_cpus(self) -> dict[str, list[int]]:
        own = {name: cpus for name, (cpus, _, _) in self._lists_of.items() if cpus}
        sets = sorted(set(own.values()), key=lambda cpus: cpus & -cpus)
        # A sum with fewer bits shows that a CPU is in two sets.
        if sum(sets).bit_count() < sum(map(int.bit_count, sets)):
            self._remarks.append("CPU affinities overlap: NUMA nodes are unknown.")
            return {}
        if sets:
            self._remarks.append(
                "NUMA nodes are unknown: they are numbered by the CPUs near GPUs."
            )
        return {name: [cpus, 1 << sets.index(cpus), 0] for name, cpus in own.items()}

    def _port_nodes(self, homes: Mapping[str, int]) -> dict[str, int]:
        near: defaultdict[str, set[int]] = defaultdict(set)
        for pair, (path, _) in self._pairs.items():
            for one, other in (pair, pair[::-1]):
                if path in _WITHIN_NODE and one in self._ports and other in homes:
                    near[one].add(homes[other])
        return {name: min(found) for name, found in near.items() if len(found) == 1}

    def _links(
        self, gpus: Mapping[str, GpuDevice], names: Mapping[str, str]
    ) -> Iterator[Link]:
        bonds: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for pair, (path, _) in self._pairs.items():
            bonded = _BONDED.fullmatch(path)
            if bonded and gpus.keys() >= set(pair):
                for one, other in (pair, pair[::-1]):
                    bonds[one][names[other]] = int(bonded[1])
        for name, gpu in gpus.items():
            targets, rates = bonds[name], self._gpus[gpu.number].rates
            # The list shows the state; the matrix shows the wiring.
            targets = targets if gpu.nvlinks else {}
            most = max(targets.values(), default=0)
            # All links, or more links than a GPU has, lead to several others: there
            # is a switch.
            if sum(targets.values()) > (most if most == len(rates) else _MAX_LINKS):
                targets = {NVSWITCH: most}
            num_links = sum(targets.values())
            if rates and not targets:
                targets = {"": len(rates)}
            elif rates and num_links != len(rates):
                self._remarks.append(
                    f"{name} has {len(rates)} active NVLinks, and of {num_links} it is "
                    "known where they lead."
                )
            if len(set(rates.values())) > 1:
                given = ", ".join(f"{rate:g}" for rate in sorted(set(rates.values())))
                self._remarks.append(f"{name} has NVLinks that signal at {given} GB/s.")
            # The signalling rate counts if the model is unknown.
            least = min(rates.values(), default=0) if gpu.sm == UNKNOWN else 0
            rate = payload_gb_per_s(least * 1000)
            for target, count in targets.items():
                yield Link(LinkKind.NVLINK, gpu.name, target, count, rate * count)


# It reads ``topo -m``, ``-mp`` and ``-p2p``, ``nvlink -s`` and ``-L``.
NVIDIA_SMI = Probe("nvidia-smi topo -m", _recognises, _read)
