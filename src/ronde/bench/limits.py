"""The limit of busbw for the ranks that are here: finds the links, takes the tightest.

Every rank looks at its own host; what they found is exchanged, and the slowest of each
link counts. Nothing is guessed: where the hardware does not tell its rate there is no
limit, and the reason is said.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ronde.addresses import (
    InterfaceAddress,
    choose_address,
    read_interfaces,
    source_towards,
)
from ronde.bench.memory_bandwidth import measure_memory
from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_json
from ronde.plain_values import from_plain, to_plain
from ronde.topology.graph import HostTopology
from ronde.topology.limits.bounds import (
    COLLECTIVES,
    Limit,
    LimitWorld,
    RankLayout,
    Rate,
    bound_of,
)
from ronde.topology.limits.host import (
    KnownRates,
    find_rdma_ports,
    slowest,
    with_gpus,
    with_network,
)
from ronde.topology.probes.sysfs import read_host
from ronde.topology.sources import Detected, detect_host

_NO_RATE = "the link rate is not known: {}; --link-rate gives it"


@dataclass(frozen=True, slots=True)
class Wires:
    """What the user knows of the links between hosts.

    Attributes:
        interface: This host's that carries what no RDMA adapter does; empty finds it.
        gb_per_s: The rate of a host's links, one direction; None reads it. Equal on all
            ranks.
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
        wires: What the user knows of the links.

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
) -> LimitWorld:
    """Return what carries the bytes of these ranks; collective."""
    counts = Counter(hosts)
    layout = RankLayout(communicator.size, len(counts), max(counts.values()))
    own = LimitWorld(layout, has_gpus=device.type == "cuda")
    if layout.num_nodes > 1:
        own = _with_network(own, communicator, hosts, wires)
    if own.has_gpus and layout.ranks_per_node > 1:
        own = _with_gpus(own, communicator, hosts, device)
    everyone = all_gather_json(communicator, to_plain(own))
    world = slowest([from_plain(LimitWorld, each) for each in everyone])
    if world.unknown or world.has_gpus:
        return world
    return _with_memory(world, communicator, hosts)


def _with_network(
    world: LimitWorld, communicator: Communicator, hosts: Sequence[str], wires: Wires
) -> LimitWorld:
    """Return a world with the links of this host that carry the bytes; collective."""
    if wires.gb_per_s is not None:
        return with_network(world, HostTopology(), KnownRates(wires.gb_per_s))
    found = _interface_between(communicator, hosts)
    host = read_host()
    if not world.has_gpus:
        # What adapters receive goes to the processors.
        host = host._replace(gpus=())
    # Gloo speaks TCP; NCCL and MPI take RDMA adapters where there are any.
    if (world.has_gpus or communicator.engine == "mpi") and find_rdma_ports(host):
        return with_network(world, host, KnownRates())
    interface = wires.interface or found
    if not interface:
        why = "no interface of a host leads to where the ranks meet"
        return world.lacking(_NO_RATE.format(why))
    return with_network(world, host, KnownRates(interface=interface))


def _interface_between(communicator: Communicator, hosts: Sequence[str]) -> str:
    """Return this host's interface towards rank 0's host; empty without; collective."""
    own = read_interfaces()
    first = all_gather_json(communicator, own)[0]
    candidates = [InterfaceAddress(*each) for each in first]
    sources = [source_towards(each.address) for each in candidates]
    everyone = zip(hosts, all_gather_json(communicator, sources), strict=True)
    others = [told for host, told in everyone if host != hosts[0]]
    best = choose_address(candidates, others, {})
    towards = "" if best is None else sources[best]
    return next((each.interface for each in own if each.address == towards), "")


def _with_gpus(
    world: LimitWorld,
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
) -> LimitWorld:
    """Return a world with the links of this host's GPUs; collective."""
    own = (hosts[communicator.rank], _bus_id(device))
    everyone = [(str(h), str(b)) for h, b in all_gather_json(communicator, own)]
    if len(set(everyone)) < len(everyone):
        return world.lacking("ranks share a GPU, whose own memory carries the bytes")
    here = {bus_id for name, bus_id in everyone if name == own[0]}
    return with_gpus_at(here, world, detect_host(Path("/"), {}))


def with_gpus_at(
    bus_ids: Collection[str], world: LimitWorld, here: Detected
) -> LimitWorld:
    """Return a world with the links of some of this host's GPUs.

    Args:
        bus_ids: Addresses of those that have a rank.
        world: What is known so far.
        here: This host.
    """
    used = [gpu for gpu in here.host.gpus if gpu.bus_id in bus_ids]
    if len(used) < len(bus_ids):
        return world.lacking("the kernel does not show the GPUs of all ranks")
    if len(used) < 2:
        return world
    found = with_gpus(world, here.host, used)
    is_silent = here.notices and found.unknown != world.unknown
    return world.lacking(here.notices[0].rstrip(".")) if is_silent else found


def _bus_id(device: torch.device) -> str:
    # torch has no types for them.
    facts: Any = cast("Any", torch.cuda).get_device_properties(device)
    place = facts.pci_domain_id, facts.pci_bus_id, facts.pci_device_id
    return "{:04x}:{:02x}:{:02x}.0".format(*place)


def _with_memory(
    world: LimitWorld, communicator: Communicator, hosts: Sequence[str]
) -> LimitWorld:
    measured = measure_memory(communicator, hosts[communicator.rank])
    rate = min(measured.gb_per_s.values())
    link = f"memory, {rate:.4g} GB/s read and written by a copy"
    return world._replace(memory=Rate(link, rate, note=measured.note))
