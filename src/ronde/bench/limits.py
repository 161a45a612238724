"""The limit of busbw for the ranks that are here: finds the links, takes the tightest.

Every rank looks at its own host; what they found is exchanged, and the slowest host
counts. Nothing is guessed: where the hardware does not tell its rate there is no limit,
and the reason is said.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ronde.bench.bounds import (
    Layout,
    Limit,
    gpu_bound,
    memory_bound,
    network_bound,
    nvls_bound,
    tightest,
)
from ronde.bench.gpu_links import GpuLinks, NoNvmlError, read_gpu_links
from ronde.bench.links import (
    Link,
    ethernet_link,
    infiniband_links,
    interface_of,
    name_links,
    node_rate,
    own_address,
)
from ronde.bench.memory_bandwidth import measure_memory
from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_object

_NO_RATE = "the link rate is not known: {}; --link-rate gives it"


@dataclass(frozen=True, slots=True)
class Wires:
    """What the user knows of the links between hosts.

    Attributes:
        interface: The network interface that carries the bytes; empty finds it.
        gb_per_s: The rate of a host's links, one direction; None reads it.
    """

    interface: str = ""
    gb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A limit, or why there is none.

    Attributes:
        limit: None where something is not known.
        reason: What that is; empty where there is a limit.
    """

    limit: Limit | None
    reason: str = ""


def search_limit(
    test: str,
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    wires: Wires = Wires(),
) -> Found:
    """Return the limit of busbw for these ranks, or why there is none; collective.

    On CPUs it takes about a second, in which all ranks copy memory.

    Args:
        test: The collective, as ``ronde bench`` spells it.
        communicator: All ranks.
        hosts: The host of every rank, in rank order; equal on all.
        device: Where this rank's tensors are.
        wires: What the user knows of the links; equal on all ranks.

    Returns:
        The same on all ranks.
    """
    counts = Counter(hosts)
    if communicator.size < 2:
        return Found(None, "one rank exchanges nothing")
    layout = Layout(communicator.size, len(counts), max(counts.values()))
    found: list[Found] = []
    if layout.num_nodes > 1:
        found.append(_network(test, communicator, layout, device, wires))
    if device.type == "cuda":
        if layout.ranks_per_node > 1:
            found.append(_gpus(test, communicator, layout, device))
    else:
        found.append(_memory(test, communicator, hosts, layout))
    # A bound that is missing might have been the tightest.
    for each in found:
        if each.limit is None:
            return each
    limit = tightest([each.limit for each in found if each.limit is not None])
    return Found(limit, "" if limit else f"{test} has no formula")


def _network(
    test: str,
    communicator: Communicator,
    layout: Layout,
    device: torch.device,
    wires: Wires,
) -> Found:
    if wires.gb_per_s is not None:
        slowest = [Link("as given", wires.gb_per_s)]
    else:
        own, reason = _own_links(communicator.engine, device, wires.interface)
        everyone = all_gather_object(communicator, (own, reason))
        for links, why in everyone:
            if not links:
                return Found(None, _NO_RATE.format(why))
        slowest = min((links for links, _ in everyone), key=node_rate)
    path = max(link.gb_per_s for link in slowest)
    rate = node_rate(slowest)
    bound = network_bound(test, layout, rate, path_gb_per_s=path)
    if bound is None:
        return Found(None, f"{test} has no formula")
    note = ""
    if test == "all_reduce" and device.type == "cuda":
        sharp = network_bound(test, layout, rate, is_reduced_in_network=True)
        note = f"switches that reduce (SHARP) allow {sharp:.4g} GB/s"
    return Found(Limit(bound, name_links(slowest), note))


def _own_links(
    engine: str, device: torch.device, interface: str
) -> tuple[list[Link], str]:
    """Return this host's links that carry the bytes, or why they are not known."""
    # Gloo speaks TCP; NCCL and MPI take RDMA adapters where there are any.
    uses_tcp = device.type == "cpu" and engine != "mpi"
    if not uses_tcp and not interface:
        adapters = infiniband_links()
        if adapters:
            return adapters, ""
    address = own_address()
    name = interface or interface_of(address)
    if not name:
        return [], f"no interface has this host's address {address or '(none)'}"
    link = ethernet_link(name)
    if link is None:
        return [], f"{name} is virtual or does not tell its speed"
    return [link], ""


def _gpus(
    test: str, communicator: Communicator, layout: Layout, device: torch.device
) -> Found:
    own: GpuLinks | str
    try:
        cuda: Any = torch.cuda  # whose properties have no types
        own = read_gpu_links(str(cuda.get_device_properties(device).uuid))
    except NoNvmlError as error:
        own = str(error)
    everyone: list[GpuLinks | str] = all_gather_object(communicator, own)
    known: list[tuple[float, GpuLinks]] = []
    for each in everyone:
        if isinstance(each, str):
            return Found(None, each)
        if each.gb_per_s is None:
            return Found(None, f"NVML tells no link of {each.name}")
        known.append((each.gb_per_s, each))
    if len({gpu.uuid for _, gpu in known}) < len(known):
        return Found(None, "ranks share a GPU, whose own memory carries the bytes")
    rate, slowest = min(known, key=lambda each: each[0])
    bound = gpu_bound(test, layout, rate)
    if bound is None:
        return Found(None, f"{test} has no formula")
    note = ""
    if test == "all_reduce" and slowest.num_nvlinks:
        note = f"switches that reduce (NVLS) allow {nvls_bound(layout, rate):.4g} GB/s"
    return Found(Limit(bound, slowest.link, note))


def _memory(
    test: str, communicator: Communicator, hosts: Sequence[str], layout: Layout
) -> Found:
    measured = measure_memory(communicator, hosts[communicator.rank])
    rate = min(measured.gb_per_s.values())
    bound = memory_bound(test, layout, rate)
    if bound is None:
        return Found(None, f"{test} has no formula")
    link = f"memory, {rate:.4g} GB/s read and written by a copy"
    return Found(Limit(bound, link, measured.note))
