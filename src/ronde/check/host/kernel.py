"""How the kernel is set up, what keeps its CPUs busy, and which machine it runs on."""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ronde.check.check import (
    INFORM,
    WARN,
    Family,
    Problem,
    check,
    each_host,
    same_everywhere,
)
from ronde.check.facts import Fleet, Reading, Value, Values
from ronde.topology.kernel_files import list_names, read_number, read_text
from ronde.topology.machine import read_gpus, read_node_cpus
from ronde.topology.pci import bus_id, read_path

MUCH_LOAD = 2.0
"""Processes that want to run, for each CPU."""

_GOVERNORS, _NODES, _BALANCING = (
    "host.governors",
    "host.numa_nodes",
    "host.numa_balancing",
)
_TRANSLATED, _VIRTUAL, _CMDLINE = (
    "host.iommu_translated",
    "host.is_virtual",
    "host.cmdline",
)
_LOAD, _ONLINE, _BUSY = "host.load_5m", "host.num_cpus_online", "host.busy"

_CPUINFO_BYTES = 8192
"""Of the first CPU; some kernels take milliseconds for each further one."""

_OF_ONE_HOST = re.compile(
    r"(BOOT_IMAGE|root|initrd|resume|ip|BOOTIF|systemd\.machine_id|rd\.\S*|nfsroot"
    r"|hostname|systemd\.hostname|ds|ifname|netroot)=.*"
    r"|.*[0-9a-f]{8}-[0-9a-f]{4}-.*"
    r"|.*([0-9a-f]{2}:){5}[0-9a-f]{2}.*",
    re.IGNORECASE,
)
"""What of a kernel's command line is each host's own."""

_HYPERVISORS = re.compile(
    r"QEMU|KVM|VMware|Virtual Machine|Google Compute Engine|Amazon EC2|OpenStack|Xen"
)
_BARE = ".metal"
"""How the products of Amazon EC2 end that are whole machines."""

_APART_S = 0.1
_MIN_AGE_S = 10.0
"""Younger processes are this check's own, or come and go."""

_MIN_CPUS = 0.3
_MAX_BUSY = 5


def read(reading: Reading) -> None:
    """Read the kernel's settings, the load, and what identifies the machine."""
    root = reading.root
    proc, adapters = Path(f"{root}/proc"), f"{root}/sys/class/infiniband"
    since_s, first = time.monotonic(), read_ticks(f"{proc}")
    reading.keep("host.kernel", lambda: _line(proc / "sys/kernel/osrelease"))
    reading.keep(_CMDLINE, lambda: parse_cmdline(_line(proc / "cmdline")))
    reading.keep(_VIRTUAL, lambda: read_is_virtual(root))
    reading.keep(_GOVERNORS, lambda: _read_governors(root))
    reading.keep(_NODES, lambda: len(read_node_cpus(root)))
    # Kernels without it have no such file, and do no balancing.
    balancing = f"{proc}/sys/kernel/numa_balancing"
    reading.keep(_BALANCING, lambda: read_number(balancing, 0))
    reading.keep("host.num_gpus", lambda: len(read_gpus(root, {})))
    reading.keep(_TRANSLATED, lambda: _read_translated(root, adapters))
    reading.keep("host.rdma_devices", lambda: list_names(adapters))
    reading.keep("host.identity", lambda: _read_identity(proc))
    loads = proc / "loadavg"
    reading.keep(_LOAD, lambda: float(loads.read_text().split()[1]))
    if reading.values.get(_LOAD, 0.0) > 1.0:
        time.sleep(max(0.0, since_s + _APART_S - time.monotonic()))
        reading.keep(_BUSY, lambda: find_busy(f"{proc}", first, since_s))
    else:
        reading.values[_BUSY] = []


def read_is_virtual(root: str) -> bool:
    """Return whether this is a virtual machine; if that is unknown, it is none.

    x86 shows it by a flag of its CPUs. Others do not, and there the name of the
    firmware's maker counts.
    """
    cpu = read_text(f"{root}/proc/cpuinfo", _CPUINFO_BYTES)
    flags = re.search(r"^flags\s*:(.*)", cpu, re.MULTILINE)
    if flags is not None:
        return "hypervisor" in flags[1].split()
    firmware = f"{root}/sys/class/dmi/id"
    names = " ".join(
        read_text(f"{firmware}/{name}") for name in ("sys_vendor", "product_name")
    )
    return _HYPERVISORS.search(names) is not None and not names.endswith(_BARE)


def parse_cmdline(text: str) -> list[str]:
    """Return a kernel's command line without what is each host's own, in order."""
    return sorted(word for word in text.split() if not _OF_ONE_HOST.fullmatch(word))


def _line(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _read_governors(root: str) -> Value:
    """Return how many frequency domains have which governor; none in most VMs."""
    policies = f"{root}/sys/devices/system/cpu/cpufreq"
    governors = (
        read_text(f"{policies}/{name}/scaling_governor")
        for name in list_names(policies)
    )
    return dict(Counter(filter(None, governors)))


def _read_translated(root: str, adapters: str) -> list[str]:
    """Return the addresses of GPUs and RDMA adapters whose transfers are translated.

    None without a GPU: adapters send each other nothing.
    """
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


def _read_identity(proc: Path) -> str:
    """Return what no two hosts have alike, nor two containers of one machine."""
    boot = _line(proc / "sys/kernel/random/boot_id")
    name = _line(proc / "sys/kernel/hostname")
    spaces = [os.readlink(proc / "self/ns" / kind) for kind in ("net", "pid", "mnt")]  # noqa: PTH115
    return " ".join((boot, name, *spaces))


class Ticks(NamedTuple):
    """Of a process: its name, the ticks of CPU it has used, and when it began."""

    name: str
    ticks: int
    started_ticks: int


def parse_stat(text: str) -> Ticks:
    """Return what ``/proc/PID/stat`` shows.

    Raises:
        ValueError: It is no such line.
        IndexError: It is cut short.
    """
    front, _, rest = text.rpartition(")")
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])
    return Ticks(front.partition("(")[2], ticks, int(fields[19]))


def read_ticks(proc: str) -> dict[int, Ticks]:
    """Return what all processes have used, by pid."""
    found: dict[int, Ticks] = {}
    for name in list_names(proc):
        text = read_text(f"{proc}/{name}/stat") if name.isdecimal() else ""
        # It may have ended meanwhile.
        with suppress(ValueError, IndexError):
            found[int(name)] = parse_stat(text)
    return found


def find_busy(proc: str, first: dict[int, Ticks], since_s: float) -> Value:
    """Return who keeps CPUs busy since a first look, the busiest first."""
    now, per_s = read_ticks(proc), os.sysconf("SC_CLK_TCK")
    passed_s = time.monotonic() - since_s
    begun = (float(read_text(f"{proc}/uptime").split()[0]) - _MIN_AGE_S) * per_s
    used = [
        ((each.ticks - first[pid].ticks) / per_s / passed_s, pid, each.name)
        for pid, each in now.items()
        if pid in first and each.started_ticks == first[pid].started_ticks < begun
    ]
    return [
        {"pid": pid, "name": name, "cpus": round(cpus, 1)}
        for cpus, pid, name in sorted(used, reverse=True)[:_MAX_BUSY]
        if cpus >= _MIN_CPUS
    ]


@each_host(
    Family.HOST,
    WARN,
    """cpu-governor: CPUs run at full speed
    reads: scaling_governor of all frequency policies; most virtual machines have none
    threshold: performance
    source: NVIDIA's and AMD's tuning guides for GPU servers
    fix: As root: cpupower frequency-set -g performance
    why: Launching kernels is one thread's work, and it pauses often: its CPU is clocked
        down in between.
    """,
    _GOVERNORS,
)
def _cpu_governor(values: Values, _: Fleet) -> Iterator[Problem]:
    governors = values[_GOVERNORS]
    others = {name: n for name, n in governors.items() if name != "performance"}
    if others:
        # A policy may hold several CPUs: so a share, not a number of CPUs.
        share = sum(others.values()) / sum(governors.values())
        names = ", ".join(sorted(others))
        yield Problem(f"{share:.0%} of the CPUs have governor {names}")


@each_host(
    Family.HOST,
    WARN,
    """numa-balancing: the kernel does not move memory by itself
    reads: /proc/sys/kernel/numa_balancing, and the number of NUMA nodes
    threshold: 0 where there are two nodes or more
    source: AMD's and NVIDIA's tuning guides for GPU servers
    fix: As root: sysctl kernel.numa_balancing=0
    why: It unmaps pages to see who touches them; ranks pause on one host and then on
        another.
    """,
    _BALANCING,
    _NODES,
)
def _numa_balancing(values: Values, _: Fleet) -> Iterator[Problem]:
    if values[_BALANCING] and values[_NODES] >= 2:
        nodes = values[_NODES]
        yield Problem(f"the kernel moves memory between {nodes} NUMA nodes by itself")


@each_host(
    Family.HOST,
    WARN,
    """iommu: devices reach each other without translation
    reads: the type of the IOMMU groups of GPUs and RDMA adapters
    threshold: identity, on bare metal with two such devices
    source: NVIDIA's NCCL and GPUDirect documentation
    fix: Start the kernel with iommu=pt (ARM: iommu.passthrough=1), or turn the IOMMU
        off
    needs: a GPU, and another one or an RDMA adapter; no virtual machine
    why: What GPUs and adapters send each other goes through the CPU's root complex,
        slower, and on some machines wrong.
    """,
    _TRANSLATED,
    _VIRTUAL,
)
def _iommu(values: Values, _: Fleet) -> Iterator[Problem]:
    devices = values[_TRANSLATED]
    # A virtual machine needs it to have devices at all; one device has no peer.
    if not values[_VIRTUAL] and len(devices) >= 2:
        yield Problem(
            f"the IOMMU translates transfers of {len(devices)} GPUs and RDMA adapters: "
            f"{', '.join(devices[:4])}"
        )


_kernel_version = same_everywhere(
    Family.HOST,
    WARN,
    """kernel-version: all hosts run the same kernel
    reads: /proc/sys/kernel/osrelease
    threshold: what most hosts have
    source: ronde's own: hosts of one cluster come from one image
    fix: Give all hosts the same image, and restart those that were updated
    needs: several hosts
    why: A host that was left out of an update differs in drivers and limits too.
    """,
    "host.kernel",
    "kernel",
)


@check(
    Family.HOST,
    WARN,
    """kernel-command-line: all kernels were started alike
    reads: /proc/cmdline, without what names disks, images and addresses
    threshold: what most hosts have
    source: ronde's own: hosts of one cluster come from one image
    fix: Give all hosts the same options in the boot loader
    needs: several hosts
    why: iommu=, mitigations=, isolcpus= and the like change how fast a host is.
    """,
    _CMDLINE,
)
def _kernel_command_line(fleet: Fleet) -> Iterator[Problem]:
    lines: list[set[str]] = [set(words) for words in fleet.known(_CMDLINE).values()]
    shared = lines[0].intersection(*lines) if lines else set[str]()

    def show(words: list[str]) -> str:
        return " ".join(word for word in words if word not in shared) or "nothing more"

    for host, value, usual in fleet.odd_ones(_CMDLINE, show):
        what = f"the kernel was started with {value}"
        yield Problem(what, usual=usual, host=host)


@each_host(
    Family.HOST,
    WARN,
    """load: nothing else keeps the CPUs busy
    reads: the load of the last 5 minutes, and who uses CPUs now
    threshold: shown above one for each CPU, a warning above two
    source: ronde's own; gpud looks at the load as well
    fix: End what runs there, or take the host out of the job
    why: Ranks wait for CPUs, and all others for them.
    """,
    _LOAD,
    _ONLINE,
    _BUSY,
)
def _load(values: Values, _: Fleet) -> Iterator[Problem]:
    load, cpus = values[_LOAD], values[_ONLINE]
    if load > cpus > 0:
        busy = [f"{p['name']} ({p['pid']}) {p['cpus']:g}" for p in values[_BUSY]]
        more = f"; CPUs kept busy now: {', '.join(busy)}" if busy else ""
        what = f"load {load:g} on {cpus} CPUs in the last 5 minutes{more}"
        yield Problem(what, WARN if load > MUCH_LOAD * cpus else INFORM)
