"""The values of an observer's answer to the question ``usage``: a host and its GPUs."""

from typing import NamedTuple


class NetworkCounters(NamedTuple):
    """Counters of a network interface or an InfiniBand port since boot."""

    name: str
    received_bytes: int
    sent_bytes: int
    num_errors: int  # of both directions; without drops, which healthy networks have
    bits_per_s: int  # its rate; 0 if unknown


class GpuUsage(NamedTuple):
    """The state of one GPU; None for a figure that NVML does not provide."""

    number: int  # as NVML counts
    name: str
    utilization: float | None  # share of the time in which a kernel ran
    memory_bytes: int | None
    total_memory_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    clock_mhz: int | None  # of the SMs
    max_clock_mhz: int | None
    throttled_by: tuple[str, ...]  # such as ``HW thermal slowdown``
    pids: tuple[int, ...]  # of compute processes


class ProcessUsage(NamedTuple):
    """A worker's process and its descendants."""

    cpu_s: float  # since they began, also of ended ones
    rss_bytes: int  # pages that they share count in each


class HostUsage(NamedTuple):
    """One observer's answer to the question ``usage``; rates need two of them."""

    at_s: float  # of the host's own monotonic clock
    cpu_s: float  # busy CPU seconds of all cores since boot
    num_cpus: int
    memory_bytes: int  # in use; of the container or job if it has a limit
    total_memory_bytes: int
    shm_bytes: int  # in use in /dev/shm
    total_shm_bytes: int
    num_oom_kills: int  # by the kernel, in this container or job since it began
    interfaces: tuple[NetworkCounters, ...]  # adapters and InfiniBand ports
    gpus: tuple[GpuUsage, ...]
    gpu_problem: str  # why GPUs are missing or old, in half a sentence; or empty
    workers: dict[str, ProcessUsage]  # by worker id
