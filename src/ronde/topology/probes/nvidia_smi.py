"""What nvidia-smi prints of a machine's topology, as text that people save and send.

A file may hold several outputs one after another, and what a shell printed between.
People paste them: tabs become blanks, columns grow together, the underlining of the
header stays as escape sequences.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ronde.errors import UsageError
from ronde.topology.cpu_sets import format_list, members, parse_list
from ronde.topology.graph import (
    NVSWITCH,
    UNKNOWN,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    Relation,
    Topology,
)
from ronde.topology.pci import bus_order, compute_capability, plain_address
from ronde.topology.probes.base import Saved, bad_value, first_lines, lines_of_one

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOOKED_AT = 1 << 18
_MAX_REMARKS = 50
_MAX_LINE = 400
_MAX_NUMBER = (1 << 16) - 1
# No GPU has more NVLinks.
_MAX_LINKS = 18

_GPU_NAME = re.compile(r"GPU([0-9]{1,3})")
_PATHS = r"NV[0-9]{1,3}|NODE|PIX|PXB|PHB|SYS|SOC"
_PEERS = r"OK|CNS|GNS|TNS|NS|DR|U"
_WORD = re.compile(rf"X|{_PATHS}|{_PEERS}")
_WORDS = re.compile(rf"(?:X|{_PATHS}|{_PEERS})+")
_PEER = re.compile(_PEERS)
_BONDED = re.compile(r"NV([0-9]+)")
_WITHIN_NODE = ("PIX", "PXB", "PHB", "NODE")
_MISSING = ("N/A", "-", "ERR!")
_COLUMN = re.compile(r"[A-Za-z][\w.:+-]{0,63}")
_GROWN = re.compile(r"(?<=[0-9])(?=(?:GPU|NIC|mlx)[0-9])")
_HEADING = re.compile(r"CPU\s+Affinity|NUMA\s+Affinity|GPU\s+NUMA\s+ID")
_LEGEND = re.compile(r"\s*(NIC[0-9]{1,4})\s*:\s*(\S{1,64})\s*")
_LIST = re.compile(r"[0-9]{1,5}(?:-[0-9]{1,5})?(?:,[0-9]{1,5}(?:-[0-9]{1,5})?)*")

_GPU = re.compile(r"\s*GPU ([0-9]{1,3}):\s*(\S.*)")
_LINK = re.compile(r"\s*Link ([0-9]{1,3}):\s*(\S.*)")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,6})?) GB/s")
_REMOTE = re.compile(r"Remote Device (\S{1,32}): Link [0-9]{1,3}")
_INACTIVE = "<inactive>"
_SUMMARY = re.compile(
    r"\|\s*([0-9]{1,3})\s+(\S.{0,60}?)\s+(?:On|Off|N/A)\s*\|\s*([0-9A-Fa-f:.]{7,16})\s.*"
)
_Pair = tuple[str, str]
_Pairs = dict[_Pair, tuple[str, str]]
"""Path and access by the pair of names, each pair once; empty if unknown."""


class NvidiaSmiProbe:
    """Reads ``nvidia-smi topo -m``, ``-mp`` and ``-p2p``, ``nvlink -s`` and ``-R``.

    From ``nvidia-smi`` itself and its ``-L`` it takes names and addresses.
    """

    format = "nvidia-smi topo -m"

    def recognises(self, saved: Saved) -> bool:
        lines = first_lines(_plain(saved.text[:_LOOKED_AT]))
        return any(_columns(line) or _is_of_gpu(line) for line in lines)

    def read(self, saved: Saved) -> Topology:
        """Return the machine, with relations for what nothing more is known of.

        Raises:
            UsageError: There is no output, or one that does not hold together, or
                there are those of several hosts.
        """
        lines = lines_of_one(_plain(saved.text).splitlines(), saved.name)
        matrices = list(_read_matrices(lines, saved.name))
        gpus = _read_gpus(lines, saved.name)
        if not matrices and not gpus:
            raise UsageError(
                f"{saved.name} must be what nvidia-smi topo -m prints, got nothing of "
                "it. Where there are no GPUs or no NVLinks it prints nothing."
            )
        matches = (_LEGEND.fullmatch(line) for line in lines if "NIC" in line)
        legend = {match[1]: match[2] for match in matches if match}
        host = _host(matrices, gpus, legend, saved.name)
        return Topology((host._replace(sources=(f"{self.format} {saved.name}",)),))


def _plain(text: str) -> str:
    """Return text without what is for terminals, and without blanks at lines' ends."""
    plain = _ESCAPE.sub("", text.removeprefix("\ufeff"))
    return "\n".join(line.rstrip() for line in plain.splitlines())


class _Gpu(NamedTuple):
    """The content of the lines on one GPU."""

    title: str = ""
    uuid: str = ""
    bus_id: str = ""
    rates: tuple[float, ...] = ()  # GB/s at which each of its active NVLinks signals.
    # Addresses that NVLinks lead to, and how many lead there.
    remotes: tuple[tuple[str, int], ...] = ()


class _Row(NamedTuple):
    """A device's line of a matrix."""

    line: int
    # How it reaches each column's device, in nvidia-smi's words of today.
    words: tuple[str, ...]
    fields: dict[str, str]  # ``CPU`` and ``NUMA`` affinity, node of ``GPU`` memory.


class _Matrix(NamedTuple):
    """A matrix of ``topo -m`` or ``topo -p2p``."""

    line: int  # Of its header.
    columns: dict[str, int]  # Their names in order, with their places from 0.
    rows: dict[str, _Row]  # By name; network adapters' may be missing.


def _host(
    matrices: Sequence[_Matrix],
    known: Mapping[int, _Gpu],
    legend: Mapping[str, str],
    origin: str,
) -> HostTopology:
    columns = list(dict.fromkeys(name for each in matrices for name in each.columns))
    matches = filter(None, map(_GPU_NAME.fullmatch, columns))
    numbers = sorted({*known, *(int(match[1]) for match in matches)})
    gpus = {number: known.get(number, _Gpu()) for number in numbers}
    rows = {
        name: row
        for matrix in matrices
        for name, row in matrix.rows.items()
        if _GPU_NAME.fullmatch(name) and any(row.fields.values())
    }
    remarks: list[str] = []
    affinities = {name: _affinity(row, origin) for name, row in rows.items()}
    cpus, by_name = _place(affinities, remarks)
    homes = {number: by_name.get(f"GPU{number}", UNKNOWN) for number in numbers}
    addresses = _find_addresses(gpus)
    devices = [
        GpuDevice(
            bus_id=(bus_id := addresses.get(number, "")),
            number=number,
            sm=compute_capability(gpu.title),
            title=gpu.title,
            uuid=gpu.uuid,
            node=UNKNOWN if bus_id else homes[number],
        )
        for number, gpu in gpus.items()
    ]
    names = {f"GPU{gpu.number}": gpu.name for gpu in devices}
    pairs = _read_pairs(matrices, remarks)
    nodes = _port_nodes(pairs, {f"GPU{n}": home for n, home in homes.items()})
    ports = {
        name: NetPort(legend.get(name, name), node=nodes.get(name, UNKNOWN))
        for name in columns
        if name not in names
    }
    by_number = {gpu.number: gpu.name for gpu in devices}
    names |= {name: port.name for name, port in ports.items()}
    links = tuple(_find_links(gpus, by_number, addresses, _bonds(pairs), remarks))
    return HostTopology(
        numa_nodes=tuple(
            NumaNode(n, tuple(members(bits))) for n, bits in sorted(cpus.items())
        ),
        devices=tuple(PciDevice(addresses[n], node=homes[n]) for n in addresses),
        gpus=tuple(devices),
        ports=tuple(ports.values()),
        links=links,
        relations=tuple(
            Relation(names[source], names[target], path, peer)
            for (source, target), (path, peer) in pairs.items()
        ),
        remarks=tuple(remarks[:_MAX_REMARKS]),
    )


def _read_matrices(lines: Sequence[str], origin: str) -> Iterator[_Matrix]:
    """Yield the matrices in lines of text."""
    matrix: _Matrix | None = None
    headings: list[str] = []
    for number, line in enumerate(lines, 1):
        if matrix is not None and (name := _row_name(line, matrix)):
            row = _row(line, number, name, matrix, headings)
            place, wanted = matrix.columns[name], len(matrix.columns)
            if len(row.words) != wanted or row.words[place] != "X":
                rule = (
                    f"the row of {name} must have {wanted} columns as the header in "
                    f"line {matrix.line}, with X in its own"
                )
                raise bad_value(origin, number, rule, " ".join(row.words))
            matrix.rows[name] = row
        elif columns := _columns(line):
            if matrix is not None:
                yield _complete(matrix, origin)
            headings = [match[0].split()[0] for match in _HEADING.finditer(line)]
            places = {name: place for place, name in enumerate(columns)}
            if len(places) != len(columns):
                raise bad_value(origin, number, "columns must be different", line)
            matrix = _Matrix(number, places, {})
    if matrix is not None:
        yield _complete(matrix, origin)


def _columns(line: str) -> list[str]:
    """Return the columns of a header; empty for any other line."""
    if "GPU" not in line:
        return []
    heading = _HEADING.search(line)
    columns = _GROWN.sub(" ", line[: heading.start() if heading else None]).split()
    if not columns or not _GPU_NAME.fullmatch(columns[0]):
        return []
    are_names = all(
        _COLUMN.fullmatch(name)
        and not _WORDS.fullmatch(name)
        and (heading or name[-1].isdecimal())
        for name in columns
    )
    return columns if are_names else []


def _row_name(line: str, matrix: _Matrix) -> str:
    """Return the name of the row that a line is; empty if it is none."""
    words = line.split(maxsplit=2)
    if not words or words[0] not in matrix.columns or words[0] in matrix.rows:
        return ""
    # A second header begins like a row, and goes on otherwise.
    return "" if len(words) > 1 and words[1] in matrix.columns else words[0]


def _row(
    line: str, number: int, name: str, matrix: _Matrix, headings: Sequence[str]
) -> _Row:
    """Return a row with as many words as could be read."""
    words: list[str] = []
    end = tail_at = line.index(name) + len(name)
    for match in re.finditer(r"\S+", line[end:]):
        is_word = match[0] in _MISSING or _WORDS.fullmatch(match[0])
        if len(words) >= len(matrix.columns) or not is_word:
            break
        words += [""] if match[0] in _MISSING else _WORD.findall(match[0])
        tail_at = end + match.end()
    else:
        tail_at = len(line)
    tail = line[tail_at:] if words else ""
    fields = tail.split()
    # Only CPUs are left out where there are none; a lone list is not cut off its node.
    is_list = len(headings) == 2 and any(each in tail for each in "-,")
    if len(fields) == len(headings) - 1 and not is_list:
        fields.insert(0, "")
    values = ["" if field in _MISSING else field for field in fields]
    return _Row(
        number,
        tuple("SYS" if word == "SOC" else word for word in words),
        dict(zip(headings, values, strict=False)),
    )


def _complete(matrix: _Matrix, origin: str) -> _Matrix:
    absent = [name for name in matrix.columns if name not in matrix.rows]
    missing = [name for name in absent if _GPU_NAME.fullmatch(name)]
    if missing:
        rule = "a matrix must have a row for each GPU in its header"
        got = f"none for {', '.join(missing[:8])}"
        raise bad_value(origin, matrix.line, rule, got)
    return matrix


def _is_of_gpu(line: str) -> bool:
    """Return whether a line names a GPU or describes one of its links."""
    if match := _GPU.fullmatch(line):
        return "(UUID: " in match[2]
    text = match[2] if (match := _LINK.fullmatch(line)) else ""
    is_link = _RATE.fullmatch(text) or _REMOTE.fullmatch(text)
    return is_link is not None or text == _INACTIVE


def _read_gpus(lines: Sequence[str], origin: str) -> dict[int, _Gpu]:
    """Return what ``nvidia-smi``, ``-L`` and ``nvlink`` have of each GPU, by number."""
    found: dict[int, _Gpu] = {}
    # What stands below a GPU: rates or remote devices of its links.
    sections: list[tuple[int, list[float], list[str]]] = []
    for line_number, line in enumerate(lines, 1):
        if match := _GPU.fullmatch(line):
            number = int(match[1])
            gpu = found.get(number, _Gpu())
            title, _, rest = match[2].partition(" (UUID: ")
            uuid = rest.rstrip(") ") or gpu.uuid
            found[number] = gpu._replace(title=title.strip(), uuid=uuid)
            sections.append((number, [], []))
        elif match := _LINK.fullmatch(line):
            if not (sections and _take_link(match[2], *sections[-1][1:])):
                rule = "a link must stand below its GPU, with a rate or a remote device"
                raise bad_value(origin, line_number, rule, line.strip())
        elif match := _SUMMARY.fullmatch(line) if len(line) < _MAX_LINE else None:
            gpu = found.get(int(match[1]), _Gpu())
            found[int(match[1])] = gpu._replace(
                title=gpu.title or match[2], bus_id=plain_address(match[3])
            )
    for number, rates, remotes in sections:
        gpu = found[number]
        found[number] = gpu._replace(
            rates=tuple(rates) or gpu.rates,
            remotes=tuple(Counter(remotes).items()) or gpu.remotes,
        )
    return found


def _take_link(text: str, rates: list[float], remotes: list[str]) -> bool:
    """Note a link's rate or remote device; return false where it is cut."""
    if match := _RATE.fullmatch(text):
        rates.append(float(match[1]))
        return True
    if match := _REMOTE.fullmatch(text):
        remotes.append(plain_address(match[1]))
        return bool(remotes[-1])
    is_cut = text[0] in "<0123456789" or text.startswith("Remote")
    return text == _INACTIVE or not is_cut


def _find_addresses(gpus: Mapping[int, _Gpu]) -> dict[int, str]:
    """Return the bus addresses of GPUs, given or following from where links lead.

    Where links lead to as many devices as there are GPUs, and from each to none twice
    counted, these are the GPUs, which nvidia-smi numbers by their addresses.
    """
    known = {number: gpu.bus_id for number, gpu in gpus.items() if gpu.bus_id}
    reached = {bus_id for gpu in gpus.values() for bus_id, _ in gpu.remotes}
    if len(known) == len(gpus) or len(reached) != len(gpus):
        return known
    numbered = dict(zip(sorted(gpus), sorted(reached, key=bus_order), strict=True))
    counts = {(n, bus_id): num for n, g in gpus.items() for bus_id, num in g.remotes}
    are_gpus = all(
        counts.get((a, numbered[b]), 0) == counts.get((b, numbered[a]), 0)
        and (a != b or (a, numbered[a]) not in counts)
        for a in gpus
        for b in gpus
    )
    return {**numbered, **known} if are_gpus else known


def _find_links(
    gpus: Mapping[int, _Gpu],
    names: Mapping[int, str],
    addresses: Mapping[int, str],
    bonds: Mapping[int, Mapping[int, int]],
    remarks: list[str],
) -> Iterator[Link]:
    """Yield the NVLinks of GPUs, as far as it is known where they lead.

    ``bonds`` are how many NVLinks join each GPU to others by a matrix.
    """
    known = {bus_id: names[number] for number, bus_id in addresses.items()}
    reached = {frozenset(bus_id for bus_id, _ in gpu.remotes) for gpu in gpus.values()}
    # Where all GPUs' links lead to the same devices, which are no GPUs, these are
    # switches.
    is_switched = len(gpus) > 1 and len(reached) == 1
    is_switched = is_switched and not next(iter(reached)) & known.keys()
    for number, name in names.items():
        gpu, own = gpus[number], bonds.get(number, {})
        most = max(own.values(), default=0)
        # To several others by all its links, or by more than any GPU has, a GPU gets
        # through a switch.
        num_possible = most if most == len(gpu.rates) else _MAX_LINKS
        if gpu.remotes and is_switched:
            targets = {NVSWITCH: sum(count for _, count in gpu.remotes)}
        elif gpu.remotes:
            targets = {known.get(bus_id, bus_id): n for bus_id, n in gpu.remotes}
        elif sum(own.values()) > num_possible:
            targets = {NVSWITCH: most}
        else:
            targets = {names[other]: count for other, count in own.items()}
        # How fast a link signals counts where nothing better is known.
        is_unknown = compute_capability(gpu.title) == UNKNOWN
        rate = min(gpu.rates) if gpu.rates and is_unknown else 0.0
        remarks += _link_remarks(number, gpu, sum(targets.values()), rate)
        for target, count in targets.items():
            yield Link(LinkKind.NVLINK, name, target, count, rate * count)


def _link_remarks(number: int, gpu: _Gpu, num_links: int, rate: float) -> Iterable[str]:
    if gpu.rates and num_links != len(gpu.rates):
        yield (
            f"GPU{number} has {len(gpu.rates)} active NVLinks, and of {num_links} it "
            "is known where they lead."
        )
    if len(set(gpu.rates)) > 1:
        rates = ", ".join(f"{each:g}" for each in sorted(set(gpu.rates)))
        yield f"GPU{number} has NVLinks that signal at {rates} GB/s."
    if rate and num_links:
        yield (
            f"GPU{number} is of an unknown model: its NVLinks are counted as fast as "
            "they signal, which is more than they carry."
        )


_Affinity = tuple[int, list[int], list[int]]
"""CPUs as bits, NUMA nodes, and those of the GPU's own memory; empty if unknown."""


def _affinity(row: _Row, origin: str) -> _Affinity:
    bits: list[int] = []
    for heading in ("CPU", "NUMA", "GPU"):
        text = row.fields.get(heading, "")
        ends = [part.partition("-") for part in text.split(",")] if text else []
        is_list = not text or _LIST.fullmatch(text) is not None
        if not is_list or any(
            int(high or low) not in range(int(low), _MAX_NUMBER + 1)
            for low, _, high in ends
        ):
            rule = f"an affinity must be a list of numbers up to {_MAX_NUMBER}"
            raise bad_value(origin, row.line, rule, text)
        bits.append(parse_list(text))
    return bits[0], members(bits[1]), members(bits[2])


def _place(
    affinities: Mapping[str, _Affinity], remarks: list[str]
) -> tuple[dict[int, int], dict[str, int]]:
    """Return the CPUs of NUMA nodes as bits, and the node of each GPU by its name.

    Without numbers, as from drivers before 2019, sets of CPUs stand for nodes and are
    numbered by their lowest CPU.
    """
    if not any(nodes for _, nodes, _ in affinities.values()):
        return _place_by_cpus(affinities, remarks)
    cpus: dict[int, int] = {}
    homes: dict[str, int] = {}
    for name, (near, nodes, own) in affinities.items():
        homes[name] = nodes[0] if nodes else UNKNOWN
        for number in (*nodes, *own):
            cpus.setdefault(number, 0)
        if nodes:
            cpus[nodes[0]] |= near
        if len(nodes) > 1:
            remarks.append(
                f"{name} is near the NUMA nodes {format_list(nodes)}: the CPUs "
                f"{format_list(members(near))} are counted to the first."
            )
    return cpus, homes


def _place_by_cpus(
    affinities: Mapping[str, _Affinity], remarks: list[str]
) -> tuple[dict[int, int], dict[str, int]]:
    cpu_sets = {cpus for cpus, _, _ in affinities.values()} - {0}
    sets = sorted(cpu_sets, key=lambda cpus: cpus & -cpus)
    everything = 0
    for cpus in sets:
        if cpus & everything:
            remarks.append("CPU affinities overlap: NUMA nodes are unknown.")
            return {}, {}
        everything |= cpus
    if sets:
        remarks.append(
            "NUMA nodes are unknown: they are numbered by the CPUs near GPUs."
        )
    numbers = {cpus: number for number, cpus in enumerate(sets)}
    homes = {name: numbers.get(each[0], UNKNOWN) for name, each in affinities.items()}
    return dict(enumerate(sets)), homes


def _read_pairs(matrices: Iterable[_Matrix], remarks: list[str]) -> _Pairs:
    """Return what matrices have on each pair, and note contradictions.

    One that leaves NVLinks out, as ``topo -mp`` does, contradicts no other.
    """
    pairs: _Pairs = {}
    for matrix in matrices:
        for names, word in _pairs_of(matrix, remarks):
            back = names[1], names[0]
            pair = back if back in pairs else names
            path, peer = pairs.get(pair, ("", ""))
            if _PEER.fullmatch(word):
                peer = _settle(peer, word, pair, remarks)
            elif bool(_BONDED.fullmatch(path)) == bool(_BONDED.fullmatch(word)):
                path = _settle(path, word, pair, remarks)
            elif not _BONDED.fullmatch(path):
                path = word
            pairs[pair] = path, peer
    return pairs


def _pairs_of(matrix: _Matrix, remarks: list[str]) -> Iterator[tuple[_Pair, str]]:
    names = list(matrix.columns)
    for place, source in enumerate(names):
        for other in range(place + 1, len(names)):
            pair = source, names[other]
            there, back = matrix.rows.get(source), matrix.rows.get(names[other])
            words = [there.words[other] if there else ""]
            words += [back.words[place] if back else ""]
            if words := list(filter(None, words)):
                yield pair, _settle(words[0], words[-1], pair, remarks)


def _settle(first: str, second: str, pair: _Pair, remarks: list[str]) -> str:
    """Return the first word, and note where the second contradicts it."""
    if first and first != second:
        remarks.append(f"{pair[0]} and {pair[1]} are given as {first} and {second}.")
    return first or second


def _bonds(pairs: _Pairs) -> Mapping[int, Mapping[int, int]]:
    """Return how many NVLinks join GPUs, by the numbers of both."""
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for names, (path, _) in pairs.items():
        gpus = [int(match[1]) for match in map(_GPU_NAME.fullmatch, names) if match]
        bonded = _BONDED.fullmatch(path)
        if bonded and len(gpus) == 2:
            a, b = gpus
            found[a][b] = found[b][a] = int(bonded[1])
    return found


def _port_nodes(pairs: _Pairs, homes: Mapping[str, int]) -> dict[str, int]:
    """Return the NUMA node of adapters that share one with a GPU.

    Those that are near GPUs of several nodes, or of none, are not in it.
    """
    near: dict[str, set[int]] = {}
    for pair, (path, _) in pairs.items():
        for one, other in (pair, pair[::-1]):
            number = homes.get(other, UNKNOWN)
            if path in _WITHIN_NODE and one not in homes and number != UNKNOWN:
                near.setdefault(one, set()).add(number)
    return {name: min(found) for name, found in near.items() if len(found) == 1}
