"""Read the tables of ``rocm-smi --showtopo`` and ``amd-smi topology``."""

import re
from collections import defaultdict

from ronde.errors import UsageError
from ronde.topology.graph import (
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NumaNode,
    Relation,
    Topology,
)
from ronde.topology.pci import plain_address
from ronde.topology.probes.base import Probe, Saved, has_line, lines_of_one

_END = r"GPU\d{1,3}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_LABEL = re.compile(_END)
_MAX_GPUS = 256
_NODE = re.compile(r"\s*GPU ?\[?(\d{1,3})\]?\s*: \(Topology\) Numa Node: (\d{1,4})\s*")
_FORM = re.compile(
    r"between two GPUs =|^\s*(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE:"
    rf"|^\s*(?:{_END}) .*\b(?:XGMI|PCIE)\b|^{_NODE.pattern}$"
)
_TITLE = re.compile(r"\s*(?:=+ (.+?) =+|([A-Z][A-Z -]*) TABLE:)\s*")
_Words = defaultdict[str, dict[tuple[str, str], str]]
_TYPE, _HOPS, _RATE = "link type", "hops", "numa bw"


def _read_tables(saved: Saved) -> tuple[dict[str, int], _Words]:
    labels: dict[str, int] = {}
    words: _Words = defaultdict(dict)
    # A table may have lost its title.
    table, columns = _TYPE, list[str]()
    for line in lines_of_one(saved.text.splitlines(), saved.name):
        first, *rest = line.split() or [""]
        if title := _TITLE.fullmatch(line):
            name, columns = (title[1] or title[2]).lower(), []
            table = name.removesuffix(" between two gpus")
        elif match := _NODE.fullmatch(line):
            labels[f"GPU{match[1]}"] = int(match[2])
        elif len(rest) < _MAX_GPUS and all(map(_LABEL.fullmatch, [first, *rest])):
            columns = [first, *rest]
            labels = dict.fromkeys(columns, UNKNOWN) | labels
        elif first in columns and len(rest) == len(columns):
            table = _TYPE if "XGMI" in rest or "PCIE" in rest else table
            words[table] |= {(first, c): w for c, w in zip(columns, rest, strict=True)}
    return labels, words


def _read(saved: Saved) -> Topology:
    labels, words = _read_tables(saved)
    types = words[_TYPE]
    few = list(labels)[:_MAX_GPUS]
    pairs = [(one, other) for one in few for other in few if one != other]
    if not labels or (types and any(pair not in types for pair in pairs)):
        raise UsageError(
            f"{saved.name} lacks rows or columns for some of its {len(labels)} GPUs. "
            "It may be truncated. Write it with: amd-smi topology"
        )
    gpus = {
        label: GpuDevice(plain_address(label), number, node=labels[label])
        for number, label in enumerate(few)
    }
    links: list[Link] = []
    relations: list[Relation] = []
    for pair in pairs:
        ends = gpus[pair[0]].name, gpus[pair[1]].name
        kind, hops = types.get(pair, ""), words[_HOPS].get(pair, "")
        most = words[_RATE].get(pair, "").rpartition("-")[2]
        if kind == "XGMI" and hops in ("", "1"):
            rate = int(most) / 1000 if most.isdecimal() else 0.0
            links.append(Link(LinkKind.XGMI, *ends, 1, rate))
        elif kind == "XGMI":
            relations.append(Relation(*ends, "XGMI"))
        elif kind == "PCIE" and hops.isdecimal():
            # Two hops are through one processor, three through two.
            relations.append(Relation(*ends, "PHB" if int(hops) <= 2 else "SYS"))
    host = HostTopology(
        sources=(f"{AMD_SMI.format} {saved.name}",),
        numa_nodes=tuple(NumaNode(n) for n in sorted({*labels.values()} - {UNKNOWN})),
        gpus=tuple(gpus.values()),
        links=tuple(links),
        relations=tuple(relations),
    )
    return Topology((host,))


AMD_SMI = Probe("amd-smi topology or rocm-smi --showtopo", has_line(_FORM), _read)
