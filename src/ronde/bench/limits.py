"""The limit of busbw for the ranks that are here: finds the links, takes the tightest.

Every rank looks at its own host; what they found is exchanged, and the slowest host
counts. Nothing is guessed: where the hardware does not tell its rate there is no limit,
and the reason is said.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ronde.bench.gpu_links import GpuLinks, read_gpu_links
from ronde.bench.links import (
    Link,
    ethernet_link,
    infiniband_links,
    interface_of,
    join_links,
    node_rate,
    own_address,
)
from ronde.bench.memory_bandwidth import measure_memory
from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_object
from ronde.topology.limits.bounding import bound_of
from ronde.topology.limits.formulas import COLLECTIVES, Layout
from ronde.topology.limits.limit import Limit
from ronde.topology.limits.world import Rate, World
from ronde.topology.probes.nvml import NoNvmlError

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
    if test not in COLLECTIVES:
        return Found(None, f"{test} has no formula")
    if communicator.size < 2:
        return Found(None, "one rank exchanges nothing")
    world = _world(communicator, hosts, device, wires)
    # A bound that is missing might have been the tightest.
    if world.unknown:
        return Found(None, world.unknown[0])
    bound = bound_of(world, test)
    return Found(bound.limit, bound.reason)


def _world(
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    wires: Wires,
) -> World:
    """Return what carries the bytes of these ranks; collective."""
    counts = Counter(hosts)
    layout = Layout(communicator.size, len(counts), max(counts.values()))
    world = World(layout, has_gpus=device.type == "cuda")
    if layout.num_nodes > 1:
        world = _with_network(world, communicator, device, wires)
    if world.unknown:
        return world
    if not world.has_gpus:
        return _with_memory(world, communicator, hosts)
    if layout.ranks_per_node > 1:
        world = _with_gpus(world, communicator, device)
    return world


def _with_network(
    world: World, communicator: Communicator, device: torch.device, wires: Wires
) -> World:
    if wires.gb_per_s is not None:
        slowest = [Link("as given", wires.gb_per_s)]
    else:
        own = _own_links(communicator.engine, device, wires.interface)
        everyone = all_gather_object(communicator, own)
        for links, why in everyone:
            if not links:
                return _without(world, _NO_RATE.format(why))
        slowest = min((links for links, _ in everyone), key=node_rate)
    path = max(slowest, key=lambda link: link.gb_per_s)
    return world._replace(network=join_links(slowest), path=join_links([path]))


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


def _with_gpus(world: World, communicator: Communicator, device: torch.device) -> World:
    own: GpuLinks | str
    try:
        properties: Any = cast("Any", torch.cuda).get_device_properties(device)
        own = read_gpu_links(str(properties.uuid), _sm(properties))
    except NoNvmlError as error:
        own = str(error)
    everyone: list[GpuLinks | str] = all_gather_object(communicator, own)
    known: list[tuple[Rate, GpuLinks]] = []
    for each in everyone:
        if isinstance(each, str):
            return _without(world, each)
        if each.rate is None:
            return _without(world, f"NVML tells no link of {each.name}")
        known.append((each.rate, each))
    if len({gpu.uuid for _, gpu in known}) < len(known):
        why = "ranks share a GPU, whose own memory carries the bytes"
        return _without(world, why)
    rate, slowest = min(known, key=lambda each: each[0].gb_per_s)
    return world._replace(gpu=rate, has_nvls=slowest.has_nvls)


def _sm(properties: Any) -> int:  # noqa: ANN401  torch has no type for them
    return properties.major * 10 + properties.minor


def _with_memory(
    world: World, communicator: Communicator, hosts: Sequence[str]
) -> World:
    measured = measure_memory(communicator, hosts[communicator.rank])
    rate = min(measured.gb_per_s.values())
    link = f"memory, {rate:.4g} GB/s read and written by a copy"
    return world._replace(memory=Rate(link, rate, note=measured.note))


def _without(world: World, reason: str) -> World:
    return world._replace(unknown=(*world.unknown, reason))
