"""How the kernel is set up, and what it says of the machine."""

import ctypes
import os
import re
from collections import Counter
from pathlib import Path

from ronde.check.facts import Reading, Value
from ronde.check.probes.host_virtual import read_is_virtual
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.machine import read_gpus, read_node_cpus
from ronde.topology.pci import bus_id, read_path

_TIMEX_BYTES = 512
"""More than ``struct timex`` has anywhere; all zero it asks, and sets nothing."""

_TIME_ERROR = 5
_CPUINFO_BYTES = 8192
"""Of the first CPU; kernels there are that take milliseconds for each further one."""

_OF_ONE_HOST = re.compile(
    r"(BOOT_IMAGE|root|initrd|resume|ip|BOOTIF|systemd\.machine_id|rd\.\S*|nfsroot"
    r"|hostname|systemd\.hostname|ds|ifname|netroot)=.*"
    r"|.*[0-9a-f]{8}-[0-9a-f]{4}-.*"
    r"|.*([0-9a-f]{2}:){5}[0-9a-f]{2}.*",
    re.IGNORECASE,
)
"""What of a kernel's command line is each host's own."""


def read_kernel(reading: Reading, root: str) -> None:
    """Take down the kernel's settings, its age, and whether its clock is kept.

    Args:
        reading: Where to.
        root: Where ``proc`` and ``sys`` are; empty for this machine.
    """
    proc = Path(f"{root}/proc")
    reading.keep("host.kernel", lambda: _line(proc / "sys/kernel/osrelease"))
    reading.keep("host.cmdline", lambda: parse_cmdline(_line(proc / "cmdline")))
    reading.keep("host.microcode", lambda: _microcode(root))
    reading.keep("host.is_virtual", lambda: read_is_virtual(root))
    reading.keep("host.governors", lambda: _governors(root))
    reading.keep("host.numa_nodes", lambda: len(read_node_cpus(root)))
    # Kernels without it have no such file, and do no balancing.
    balancing = f"{proc}/sys/kernel/numa_balancing"
    reading.keep("host.numa_balancing", lambda: read_number(balancing, 0))
    reading.keep("host.huge_pages", lambda: _huge_pages(root))
    memory = ("memory_bytes", "swap_used_bytes", "huge_pages_free_bytes")
    with reading.reading(*(f"host.{name}" for name in memory)):
        sizes = parse_meminfo((proc / "meminfo").read_text())
        reading.values |= dict(
            zip((f"host.{name}" for name in memory), sizes, strict=True)
        )
    reading.keep("host.num_gpus", lambda: len(read_gpus(root, {})))
    reading.keep("host.iommu_translated", lambda: _translated(root))
    reading.keep("host.rdma_devices", lambda: list_names(_adapters(root)))
    reading.keep("host.is_clock_kept", _is_clock_kept)
    ports = proc / "sys/net/ipv4/ip_local_port_range"
    reading.keep("host.ephemeral_ports", lambda: [int(p) for p in _line(ports).split()])
    reading.keep("host.identity", lambda: _identity(proc))


def parse_cmdline(text: str) -> list[str]:
    """Return a kernel's command line without what is each host's own, in order."""
    return sorted(word for word in text.split() if not _OF_ONE_HOST.fullmatch(word))


def parse_meminfo(text: str) -> tuple[int, int, int]:
    """Return of ``/proc/meminfo``: all memory, swap in use, huge pages reserved unused.

    Returns:
        All in bytes.

    Raises:
        KeyError: Memory is not told.
    """
    rows = [line.split() for line in text.splitlines()]
    fields = {r[0]: int(r[1]) for r in rows if len(r) > 1 and r[1].isdecimal()}
    swap_kib = fields.get("SwapTotal:", 0) - fields.get("SwapFree:", 0)
    huge_kib = fields.get("HugePages_Free:", 0) * fields.get("Hugepagesize:", 0)
    return fields["MemTotal:"] * 1024, swap_kib * 1024, huge_kib * 1024


def _line(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _microcode(root: str) -> str:
    """Return the microcode of the first CPU; empty where there is none."""
    with Path(f"{root}/proc/cpuinfo").open(errors="replace") as file:
        first = file.read(_CPUINFO_BYTES).partition("\n\n")[0]
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    return fields.get("microcode", "")


def _governors(root: str) -> Value:
    """Return how many frequency domains have which governor; none in most VMs."""
    policies = f"{root}/sys/devices/system/cpu/cpufreq"
    told = (
        read_text(f"{policies}/{name}/scaling_governor")
        for name in list_names(policies)
    )
    return dict(Counter(filter(None, told)))


def _huge_pages(root: str) -> str:
    """Return which memory gets huge pages by itself; empty on a kernel without."""
    text = read_text(f"{root}/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else ""


def _translated(root: str) -> list[str]:
    """Return the addresses of GPUs and RDMA adapters whose transfers are translated.

    None without a GPU: adapters send each other nothing.
    """
    adapters = _adapters(root)
    addresses = {gpu.bus_id for gpu in read_gpus(root, {}) if gpu.bus_id}
    if not addresses:
        return []
    addresses |= {bus_id(read_path(f"{adapters}/{n}")) for n in list_names(adapters)}
    group = f"{root}/sys/bus/pci/devices/{{}}/iommu_group/type"
    return sorted(
        address
        for address in addresses
        if address and read_text(group.format(address)).startswith("DMA")
    )


def _adapters(root: str) -> str:
    return f"{root}/sys/class/infiniband"


def _is_clock_kept() -> bool:
    """Return whether something keeps the kernel's clock right; needs no privilege.

    Raises:
        OSError: A sandbox forbids to ask.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "adjtimex")
    return state != _TIME_ERROR


def _identity(proc: Path) -> str:
    """Return what no two hosts have alike, nor two containers of one machine."""
    boot = _line(proc / "sys/kernel/random/boot_id")
    name = _line(proc / "sys/kernel/hostname")
    spaces = [os.readlink(proc / "self/ns" / kind) for kind in ("net", "pid", "mnt")]  # noqa: PTH115
    return " ".join((boot, name, *spaces))
