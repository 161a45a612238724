"""Rules on which GPU is near which network adapter."""

from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.graph import NetPort
from ronde.topology.lint.host_view import HostView
from ronde.topology.lint.rule import Rule, rate_loss
from ronde.topology.paths.path import Path, PathKind

_RDMA_MBIT_PER_S = 25_000
"""Slower adapters seldom have GPUDirect RDMA."""


def _far_nics(view: HostView) -> Iterator[Finding]:
    for gpu in view.gpus:
        ways = _ways(view, gpu)
        if not ways:
            continue
        nearest = min(ways, key=lambda way: (way[1].kind, -way[1].gb_per_s))
        chosen = min(ways, key=lambda way: (-way[1].gb_per_s, way[1].kind))
        if nearest[1].kind <= PathKind.PXB < chosen[1].kind:
            has, should = nearest[1].gb_per_s, chosen[1].gb_per_s
            yield Finding(
                rule="far-nic",
                severity=rate_loss(has, should),
                element=gpu,
                what=f"NCCL chooses {chosen[0].title} ({chosen[1].kind.name}), and "
                f"{nearest[0].title} is nearer ({nearest[1].kind.name}).",
                consequence=f"It prefers {should:g} GB/s to {has:g}, and beyond PXB "
                "there is no GPUDirect RDMA: the data goes through the host's memory.",
                remedy=f"Look why the way to {nearest[0].title} is slow (slow-bridge, "
                "trained-down, odd-nic-speed), or name the adapters in NCCL_IB_HCA.",
                has_gb_per_s=has,
                should_gb_per_s=should,
            )


def _through_processor(view: HostView) -> Iterator[Finding]:
    for gpu in view.gpus:
        ways = _ways(view, gpu)
        if not ways:
            continue
        fastest = max(port.mbit_per_s for port, _ in ways)
        way = min((way for _, way in ways), key=lambda way: (way.kind, -way.gb_per_s))
        if way.kind <= PathKind.PXN or (fastest and fastest < _RDMA_MBIT_PER_S):
            continue
        is_far = way.kind > PathKind.PHB
        place = "another socket's" if is_far else "its own"
        yield Finding(
            rule="nic-behind-processor",
            severity=Severity.NOTE,
            element=gpu,
            what=f"Its nearest network adapter is behind {place} processor "
            f"({way.kind.name}).",
            consequence=f"Up to {way.gb_per_s:g} GB/s (NCCL's figure), and by default "
            "NCCL uses GPUDirect RDMA up to PXB alone: the data goes through the "
            "host's memory.",
            remedy="Write the switches in, where a virtual machine's file leaves them "
            "out; "
            + (
                "else place adapters at every socket."
                if is_far
                else "else try NCCL_NET_GDR_LEVEL=PHB where the maker allows it."
            ),
            has_gb_per_s=way.gb_per_s,
        )


def _without_gpus(view: HostView) -> Iterator[Finding]:
    near: dict[str, bool] = {}
    for gpu in view.gpus:
        for port, way in _ways(view, gpu):
            near[port.name] = near.get(port.name, False) or way.kind <= PathKind.PXB
    if not any(near.values()):
        return
    for name, is_near in near.items():
        if not is_near:
            yield Finding(
                rule="nic-without-gpu",
                severity=Severity.NOTE,
                element=name,
                what="No GPU is near the adapter (PIX or PXB), and other adapters "
                "have one.",
                consequence="NCCL uses it for no GPU, or without GPUDirect RDMA.",
                remedy="Nothing, where it is for storage or management; else move it "
                "to a switch with GPUs, and leave it out in NCCL_IB_HCA.",
            )


def _ways(view: HostView, gpu: str) -> list[tuple[NetPort, Path]]:
    """Return the ways to the ports that carry the traffic between hosts.

    Those are hardware, up, and at least half as fast as the fastest: not the one for
    management.
    """
    ports = [port for port in view.host.ports if port.bus_id and port.is_up]
    fastest = max((port.mbit_per_s for port in ports), default=0)
    found = [
        (port, view.paths.between(gpu, port.name))
        for port in ports
        if 2 * port.mbit_per_s >= fastest
    ]
    return [(port, way) for port, way in found if way]


RULES = (
    Rule(
        "far-nic",
        "a GPU for which NCCL prefers a far network adapter to a near one",
        _far_nics,
    ),
    Rule(
        "nic-behind-processor",
        "a GPU without a network adapter on its own PCI switch",
        _through_processor,
    ),
    Rule(
        "nic-without-gpu",
        "a network adapter that is near no GPU while others are",
        _without_gpus,
    ),
)
