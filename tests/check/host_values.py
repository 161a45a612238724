"""A healthy host, as values by hand, and hosts that differ from it."""

from typing import Any

from ronde.check import Fleet, HostFacts

GIB = 1 << 30

HEALTHY: dict[str, Any] = {
    "host.memlock_bytes": -1,
    "host.open_files": 1 << 20,
    "host.max_processes": 1 << 20,
    "host.hard_open_files": 1 << 20,
    "host.hard_max_processes": 1 << 20,
    "host.capabilities": [],
    "host.rdma_devices": [],
    "host.shm_size_bytes": 128 * GIB,
    "host.shm_free_bytes": 127 * GIB,
    "host.memory_bytes": 256 * GIB,
    "host.memory_available_bytes": 250 * GIB,
    "host.pids_max": 1 << 40,
    "host.pids_left": 1 << 40,
    "host.cpu_quota": 0.0,
    "host.num_cpus": 64,
}


def make_host(name: str, **changes: Any) -> HostFacts:
    """Return a host that is healthy but for some facts, named without ``host.``."""
    values = HEALTHY | {f"host.{key}": value for key, value in changes.items()}
    return HostFacts(name, values, {}, {})


def make_fleet(
    *names: str, settings: dict[str, Any] | None = None, **odd: dict[str, Any]
) -> Fleet:
    """Return hosts of which some differ: ``b={"num_cpus": 8}``."""
    hosts = tuple(make_host(name, **odd.get(name, {})) for name in names)
    return Fleet(hosts, settings or {})
