"""Rules on the links between GPUs."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from ronde.topology.findings import Level
from ronde.topology.graph import NVSWITCH, GpuDevice
from ronde.topology.lint.view import Hit, HostView, rate_loss, rule
from ronde.topology.paths.speeds import (
    LOCAL_GB_PER_S,
    max_nvlinks,
    nvlink_gb_per_s,
    xgmi_gb_per_s,
)

_SWITCH_CLASS = 0x068000
# Compute capability of the last chip whose number of NVLinks is known.
_LATEST_SM = 103


@rule(
    "link-to-itself",
    "NVLink or xGMI that leads from a GPU to itself",
    "Write the bus address of the GPU at the other end as target; nvidia-smi topo -m "
    "and nvidia-smi nvlink -R show it.",
)
def _to_itself(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        own = [link for link in links if link.target == name]
        if own:
            num = sum(link.num_links for link in own)
            has, should = _bus_rate(view, name), num * _link_rate(view, name)
            yield Hit(
                name,
                Level.ERROR,
                f"{num} links between GPUs lead from the GPU to itself.",
                f"They connect it to no other GPU{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "gpu-told-as-switch",
    "NVLink to a GPU whose class is given as that of a switch",
    'Write one line, target="fffffff:ff:ff.0", tclass="0x068000" and the GPU\'s own '
    'number of links, where there are switches; else tclass="0x030200".',
)
def _as_switches(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        wrong = [
            link
            for link in links
            if link.target in view.gpus and link.target_class == _SWITCH_CLASS
        ]
        if wrong:
            num = sum(link.num_links for link in wrong)
            yield Hit(
                name,
                Level.ERROR,
                f"NVLinks lead to {len(wrong)} GPUs whose class is given as that of an "
                "NVLink switch (0x068000).",
                f"NCCL takes all {num} for links into one switch and adds them up.",
            )


@rule(
    "too-many-nvlinks",
    "more NVLinks than the chip has",
    "Let the counts of one GPU add up to what nvidia-smi nvlink -s shows.",
)
def _too_many(view: HostView) -> Iterator[Hit]:
    for gpu in view.gpus.values():
        num, most = _num_links(view, gpu.name), max_nvlinks(gpu.sm)
        # Of later chips nobody knows yet how many they have.
        is_known = 0 < gpu.sm <= _LATEST_SM and not gpu.gcn
        if not is_known or not 0 < most < num:
            continue
        rate = nvlink_gb_per_s(gpu.sm)
        has, should = num * rate, most * rate
        cap = f", over its cap of {LOCAL_GB_PER_S:g}" if has > LOCAL_GB_PER_S else ""
        yield Hit(
            gpu.name,
            Level.ERROR,
            f"{num} NVLinks are listed, and the chip (sm {gpu.sm}) has {most}.",
            f"NCCL plans with {has:.1f} GB/s{cap}, where {should:.1f} exist, and "
            "chooses channels and algorithms by that.",
            has,
            should,
        )


@rule(
    "gpu-without-links",
    "a GPU without NVLink or xGMI on a host where others have it",
    "Look at nvidia-smi nvlink -s and, with switches, at the fabric manager's log; "
    "reset or replace the GPU, or leave it out.",
)
def _missing(view: HostView) -> Iterator[Hit]:
    linked = {gpu.name for gpu in view.host.gpus if _is_linked(view, gpu)}
    should = max((_total_rate(view, name) for name in linked), default=0.0)
    for gpu in view.host.gpus:
        if linked and gpu.name not in linked:
            has = _bus_rate(view, gpu.name)
            yield Hit(
                gpu.name,
                Level.ERROR,
                "The GPU has no links to other GPUs, and others of this host have.",
                "Every ring through it falls back to the PCI bus"
                f"{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "uneven-nvlinks",
    "a GPU with fewer NVLinks than others of its kind",
    "Look at nvidia-smi nvlink -s and -e for links that are down or count errors, and "
    "reset the GPU.",
)
def _uneven(view: HostView) -> Iterator[Hit]:
    totals = {
        gpu.name: num
        for gpu in view.gpus.values()
        if not gpu.gcn and (num := _num_links(view, gpu.name))
    }
    kinds = {view.gpus[name].sm for name in totals}
    most = max(totals.values(), default=0)
    for name, num in totals.items():
        if num < most and len(kinds) == 1:
            has, should = _total_rate(view, name), most * _link_rate(view, name)
            yield Hit(
                name,
                rate_loss(num, most),
                f"{num} NVLinks are up, and other GPUs of this host have {most}.",
                f"Collectives run at the slowest GPU's rate{_rates(has, should)}.",
                has,
                should,
            )


@rule(
    "one-way-link",
    "links between two GPUs with fewer links back",
    "Give both GPUs the same count; nvidia-smi nvlink -R shows it.",
)
def _one_way(view: HostView) -> Iterator[Hit]:
    counts: Counter[tuple[str, str]] = Counter()
    for link in chain.from_iterable(view.direct_links.values()):
        is_between = link.source in view.gpus and link.target in view.gpus
        if is_between and link.source != link.target:
            counts[link.source, link.target] += link.num_links
    for (source, target), num in counts.items():
        back = counts[target, source]
        if back < num:
            yield Hit(
                source,
                Level.WARNING,
                f"{num} links lead to {target}, and {back} lead back.",
                "What comes back has less bandwidth, or none of its own.",
            )


@rule(
    "link-to-hidden-gpu",
    "links to a GPU that is not listed",
    "Nothing, where the job has a part of the GPUs; else list them.",
)
def _to_hidden(view: HostView) -> Iterator[Hit]:
    for name, links in view.direct_links.items():
        hidden = [
            link.target
            for link in links
            if link.target not in (*view.gpus, NVSWITCH)
            and link.target_class >> 16 in (0x03, 0x12)
        ]
        if hidden:
            yield Hit(
                name,
                Level.NOTE,
                f"Links lead to {len(hidden)} GPUs that are not listed, such as "
                f"{hidden[0]}.",
                "NCCL drops these links.",
            )


@rule(
    "no-peer-access",
    "GPUs that may not reach each other's memory",
    "CNS: the processor's chipset does not; TNS: no bus between them does; GNS: this "
    "kind of GPU does not. In a virtual machine look whether the host passes peer "
    "access on; switch ACS off on the bridges.",
)
def _no_peer_access(view: HostView) -> Iterator[Hit]:
    bad: dict[str, Counter[str]] = {}
    for each in view.host.relations:
        if each.peer and each.peer not in ("OK", "X") and each.source != each.target:
            bad.setdefault(each.source, Counter())[each.peer] += 1
    for name, words in bad.items():
        counts = ", ".join(f"{word} for {num}" for word, num in sorted(words.items()))
        yield Hit(
            name,
            Level.WARNING,
            f"The driver does not let it reach the memory of other GPUs ({counts}).",
            "NCCL copies through the host's shared memory instead.",
        )


def _num_links(view: HostView, name: str) -> int:
    own = view.direct_links.get(name, ())
    return sum(link.num_links for link in own if link.target != name)


def _is_linked(view: HostView, gpu: GpuDevice) -> bool:
    """Whether links to others are listed, by themselves or as ``NV4`` of a pair."""
    return any(
        link.num_links > 0 and link.target != gpu.name
        for link in view.direct_links.get(gpu.name, ())
    ) or any(
        each.path.startswith("NV")
        for each in view.host.relations
        if gpu.name in (each.source, each.target)
    )


def _total_rate(view: HostView, name: str) -> float:
    return _num_links(view, name) * _link_rate(view, name)


def _link_rate(view: HostView, name: str) -> float:
    """Return NCCL's GB/s for one link of a GPU; 0 where its chip is unknown."""
    gpu = view.gpus.get(name)
    if gpu and gpu.gcn:
        return xgmi_gb_per_s(gpu.gcn)
    return nvlink_gb_per_s(gpu.sm) if gpu and gpu.sm > 0 else 0.0


def _bus_rate(view: HostView, name: str) -> float:
    """Return the GB/s of the best way from one GPU to any other; 0 for none."""
    others = (gpu.name for gpu in view.host.gpus if gpu.name != name)
    ways = (view.paths.between(name, other) for other in others)
    return max((way.gb_per_s for way in ways if way), default=0.0)


def _rates(has: float, should: float) -> str:
    is_loss = 0 < has < should
    return f": {has:g} instead of {should:g} GB/s (NCCL's figures)" if is_loss else ""


RULES = (
    _to_itself,
    _as_switches,
    _too_many,
    _missing,
    _uneven,
    _one_way,
    _to_hidden,
    _no_peer_access,
)
