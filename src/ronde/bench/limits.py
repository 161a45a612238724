"""The physical bound of busbw: the slowest link between the ranks.

Every rank reads the links of its own host; the ranks exchange them, and the slowest of
each kind counts. If the rate of a link is unknown, there is no bound, and the reason is
shown.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ronde.addresses import (
    InterfaceAddress,
    choose_address,
    read_interfaces,
    source_towards,
)
from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_json
from ronde.memory import available_memory
from ronde.plain_values import from_plain, to_plain
from ronde.topology.graph import HostTopology
from ronde.topology.limits import (
    COLLECTIVES,
    Bound,
    KnownRates,
    LimitWorld,
    RankLayout,
    Rate,
    bound_of,
    find_rdma_ports,
    slowest,
    with_gpus,
    with_network,
)
from ronde.topology.probes.sysfs import read_host
from ronde.topology.sources import Detected, detect_host
from ronde.units import format_size

_ROOT = Path("/")
_CACHES = "sys/devices/system/cpu/cpu*/cache/index*"
_SIZE = re.compile(r"(\d+)([KMG]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TIMES_CACHE = 2
_MIN_BYTES, _MAX_BYTES = 64 << 20, 1 << 30  # buffers of all ranks together
_SHARE_OF_MEMORY = 8
_NUM_ROUNDS = 5
_ROUND_S = 0.06
_PIECE_BYTES = 8 << 20
_TOUCH_S = 0.4  # limit for touching pages, which is slow in some virtual machines


def cache_bytes(root: Path = _ROOT) -> int:
    """Return the total size of a machine's last-level caches; 0 if unknown.

    A virtual machine may report the whole cache of its host's processor.
    """
    sizes: dict[tuple[int, str], int] = {}
    for folder in root.glob(_CACHES):
        try:
            level = int((folder / "level").read_text())
            shared = (folder / "shared_cpu_list").read_text().strip()
            size = _SIZE.match((folder / "size").read_text())
        except (OSError, ValueError):
            continue
        if size is not None:
            sizes[level, shared] = int(size[1]) * _UNITS[size[2]]
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def buffer_bytes(cache: int, available: int, num_ranks: int) -> int:
    """Return the size of each of a rank's two buffers for copying memory."""
    # All buffers together are twice the caches, at most an eighth of the free memory.
    wanted = min(max(_TIMES_CACHE * cache, _MIN_BYTES), _MAX_BYTES)
    total = min(wanted, available // _SHARE_OF_MEMORY)
    return max(total // (2 * num_ranks), 1 << 12) & ~0xFFF


def measure_memory(
    communicator: Communicator, host: str
) -> tuple[dict[str, float], str]:
    """Measure memory bandwidth by concurrent copies on all ranks; collective.

    Takes about a second. Returns each host's rate in GB/s, reads plus writes, from the
    best of several rounds, and a note on results that may exceed this rate.
    """
    hosts = all_gather_json(communicator, host)
    available = min(all_gather_json(communicator, available_memory().num_bytes))
    cache = cache_bytes()
    source, target = _touched(buffer_bytes(cache, available, hosts.count(host)))

    def best_sums(best: Mapping[str, float], own: float) -> dict[str, float]:
        sums: Counter[str] = Counter()
        for name, value in zip(hosts, all_gather_json(communicator, own), strict=True):
            sums[name] += value
        return {name: max(value, best.get(name, 0.0)) for name, value in sums.items()}

    best: dict[str, float] = {}
    for _ in range(_NUM_ROUNDS):
        communicator.barrier().wait()
        best = best_sums(best, copy_gb_per_s(source, target))
    size_bytes = int(min(best_sums({}, 2 * source.numel()).values()))
    note = "sizes that stay in the cache may exceed it"
    if not size_bytes >= _TIMES_CACHE * max(all_gather_json(communicator, cache)) > 0:
        size = format_size(size_bytes)
        note += f"; it was measured over {size}, which may have stayed there too"
    return best, note


def _touched(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate two buffers of up to ``size`` bytes and touch their pages."""
    source, target = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    start_s = time.perf_counter()
    end = 0
    while end < size and (end == 0 or time.perf_counter() - start_s < _TOUCH_S):
        for buffer in (source, target):
            buffer[end : end + _PIECE_BYTES].fill_(1)
        end = min(end + _PIECE_BYTES, size)
    return source[:end], target[:end]


def copy_gb_per_s(
    source: torch.Tensor,
    target: torch.Tensor,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Copy repeatedly for a short time; return the rate in GB/s, reads plus writes."""
    num_bytes, start_ns = 0, clock_ns()
    while True:
        target.copy_(source)
        num_bytes += 2 * source.numel()
        elapsed_ns = clock_ns() - start_ns
        if elapsed_ns >= _ROUND_S * 1e9:
            return num_bytes / elapsed_ns


_NO_RATE = "the link rate is not known: {}; --link-rate gives it"


def search_limit(
    test: str,
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    given: KnownRates,
) -> Bound:
    """Return the bound of busbw, or the reason why there is none; collective.

    On CPUs this takes about a second, in which all ranks copy memory. ``hosts`` has the
    host of every rank. ``given`` has the rate of a host's links, equal on all ranks, or
    this host's interface for TCP.
    """
    if test not in COLLECTIVES:
        return Bound(test, None, f"{test} has no formula")
    if communicator.size < 2:
        return Bound(test, None, "one rank exchanges nothing")
    world = _world(communicator, hosts, device, given)
    # A missing bound might have been the tightest.
    if world.unknown:
        return Bound(test, None, world.unknown[0])
    return bound_of(world, test)


def _world(
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
    given: KnownRates,
) -> LimitWorld:
    counts = Counter(hosts)
    layout = RankLayout(communicator.size, len(counts), max(counts.values()))
    own = LimitWorld(layout, has_gpus=device.type == "cuda")
    if layout.num_nodes > 1:
        own = _with_network(own, communicator, hosts, given)
    if own.has_gpus and layout.ranks_per_node > 1:
        own = _with_gpus(own, communicator, hosts, device)
    everyone = all_gather_json(communicator, to_plain(own))
    world = slowest([from_plain(LimitWorld, each) for each in everyone])
    if world.unknown or world.has_gpus:
        return world
    rates, note = measure_memory(communicator, hosts[communicator.rank])
    rate = min(rates.values())
    link = f"memory, {rate:.4g} GB/s read and written by a copy"
    return world._replace(memory=Rate(link, rate, note=note))


def _with_network(
    world: LimitWorld,
    communicator: Communicator,
    hosts: Sequence[str],
    given: KnownRates,
) -> LimitWorld:
    if given.network_gb_per_s is not None:
        return with_network(world, HostTopology(), given)
    found = _interface_between(communicator, hosts)
    host = read_host()
    if not world.has_gpus:
        # Received bytes go to the processors.
        host = host._replace(gpus=())
    # Gloo uses TCP; NCCL and MPI use RDMA adapters if there are any.
    if (world.has_gpus or communicator.engine == "mpi") and find_rdma_ports(host):
        return with_network(world, host, KnownRates())
    interface = given.interface or found
    if not interface:
        reason = "no interface of a host leads to rank 0's host"
        return world.lacking(_NO_RATE.format(reason))
    return with_network(world, host, KnownRates(interface=interface))


def _interface_between(communicator: Communicator, hosts: Sequence[str]) -> str:
    """Return this host's interface towards rank 0's host, or ""; collective."""
    own = read_interfaces()
    first = all_gather_json(communicator, own)[0]
    candidates = [InterfaceAddress(*each) for each in first]
    sources = [source_towards(each.address) for each in candidates]
    everyone = zip(hosts, all_gather_json(communicator, sources), strict=True)
    others = [seen for host, seen in everyone if host != hosts[0]]
    best = choose_address(candidates, others, {})
    towards = "" if best is None else sources[best]
    return next((each.interface for each in own if each.address == towards), "")


def pci_address(device: torch.device) -> str:
    """Return a GPU's PCI domain, bus and device; zeros for a CPU."""
    facts: Any = None
    if device.type == "cuda":
        # torch has no types for these properties.
        facts = cast("Any", torch.cuda).get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    return "{:04x}:{:02x}:{:02x}".format(*(getattr(facts, n, 0) for n in names))


def _with_gpus(
    world: LimitWorld,
    communicator: Communicator,
    hosts: Sequence[str],
    device: torch.device,
) -> LimitWorld:
    own = (hosts[communicator.rank], f"{pci_address(device)}.0")
    everyone = [(str(h), str(b)) for h, b in all_gather_json(communicator, own)]
    if len(set(everyone)) < len(everyone):
        return world.lacking("ranks share a GPU, whose own memory carries the bytes")
    here = {bus_id for name, bus_id in everyone if name == own[0]}
    return with_gpus_at(here, world, detect_host(Path("/"), {}))


def with_gpus_at(
    bus_ids: Collection[str], world: LimitWorld, here: Detected
) -> LimitWorld:
    used = [gpu for gpu in here.host.gpus if gpu.bus_id in bus_ids]
    if len(used) < len(bus_ids):
        return world.lacking("the kernel does not show the GPUs of all ranks")
    if len(used) < 2:
        return world
    found = with_gpus(world, here.host, used)
    is_silent = here.notices and found.unknown != world.unknown
    return world.lacking(here.notices[0].rstrip(".")) if is_silent else found
