"""How kernels are set up, and whether all hosts have the same."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity, alike
from ronde.check.families.host_judges import Grade, Values, graded
from ronde.check.fleet import Fleet

MAX_KEPT_OFFSET_S = 0.1
"""A clock that is measured to be no further off is kept, whatever the kernel knows."""

PORTS_PER_HOST = 145
PORTS_AT_LEAST = 683

_OFFSET = "cluster.clock_offset_s"


def _grade_governor(values: Values, _: Values) -> Grade | None:
    governors = values["host.governors"]
    others = {name: n for name, n in governors.items() if name != "performance"}
    if not others:
        return None
    # A policy may hold several CPUs: shares are told, not CPUs.
    share = sum(others.values()) / sum(governors.values())
    names = ", ".join(sorted(others))
    return Grade(Severity.WARN, f"{share:.0%} of the CPUs have governor {names}")


def _grade_balancing(values: Values, _: Values) -> Grade | None:
    nodes = values["host.numa_nodes"]
    if not values["host.numa_balancing"] or nodes < 2:
        return None
    return Grade(
        Severity.WARN, f"the kernel moves memory between {nodes} NUMA nodes by itself"
    )


def _grade_huge_pages(values: Values, _: Values) -> Grade | None:
    if values["host.huge_pages"] != "never":
        return None
    return Grade(Severity.INFORM, "transparent huge pages are off")


def _grade_iommu(values: Values, _: Values) -> Grade | None:
    devices = values["host.iommu_translated"]
    # A virtual machine needs it to have devices at all; one device has no peer.
    if values["host.is_virtual"] or len(devices) < 2:
        return None
    return Grade(
        Severity.WARN,
        f"the IOMMU translates what {len(devices)} GPUs and RDMA adapters transfer: "
        f"{', '.join(devices[:4])}",
    )


def _judge_clock(fleet: Fleet) -> Iterator[Finding]:
    if len(fleet.hosts) < 2:
        return
    for facts in fleet.having("host.is_clock_kept"):
        if facts.values["host.is_clock_kept"]:
            continue
        offset_s = facts.values.get(_OFFSET)
        is_right = offset_s is not None and abs(offset_s) <= MAX_KEPT_OFFSET_S
        yield Finding(
            "clock-kept",
            Severity.INFORM if is_right else Severity.WARN,
            facts.host,
            "the kernel says that nothing keeps its clock right",
        )


def _judge_command_lines(fleet: Fleet) -> Iterator[Finding]:
    name = "host.cmdline"
    lines: list[set[str]] = [set(f.values[name]) for f in fleet.having(name)]
    shared = lines[0].intersection(*lines) if lines else set[str]()

    def show(words: list[str]) -> str:
        return " ".join(word for word in words if word not in shared) or "nothing more"

    for host, value, usual in fleet.odd_ones(name, show):
        yield Finding(
            "kernel-command-line",
            Severity.WARN,
            host,
            f"the kernel was started with {value}",
            usual,
        )


def _judge_ports(fleet: Fleet) -> Iterator[Finding]:
    num_hosts = len(fleet.hosts)
    if num_hosts < 2:
        return
    needed = 2 * (PORTS_PER_HOST * num_hosts + PORTS_AT_LEAST)
    for facts in fleet.having("host.ephemeral_ports"):
        first, last = facts.values["host.ephemeral_ports"]
        count = last - first + 1
        if count < needed:
            yield Finding(
                "ephemeral-ports",
                Severity.WARN,
                facts.host,
                f"{count} ports for outgoing connections, where {num_hosts} hosts may "
                f"need {needed}",
            )


def _show_microcode(version: str) -> str:
    return version or "not told"


CHECKS = (
    Check(
        id="cpu-governor",
        family=Family.HOST,
        title="CPUs run at full speed",
        reads="scaling_governor of all frequency policies; there is none in most "
        "virtual machines",
        threshold="performance",
        source="NVIDIA's and AMD's tuning guides for GPU servers",
        severity=Severity.WARN,
        fix="As root: cpupower frequency-set -g performance",
        needs="",
        why="Launching kernels is one thread's work, and it pauses often: its CPU "
        "is clocked down in between.",
        facts=("host.governors",),
        judge=graded("cpu-governor", ("host.governors",), _grade_governor),
    ),
    Check(
        id="numa-balancing",
        family=Family.HOST,
        title="the kernel does not move memory by itself",
        reads="/proc/sys/kernel/numa_balancing, and the number of NUMA nodes",
        threshold="0 where there are two nodes or more",
        source="AMD's and NVIDIA's tuning guides for GPU servers",
        severity=Severity.WARN,
        fix="As root: sysctl kernel.numa_balancing=0",
        needs="",
        why="It unmaps pages to see who touches them; ranks pause on one host and "
        "then on another.",
        facts=("host.numa_balancing", "host.numa_nodes"),
        judge=graded(
            "numa-balancing",
            ("host.numa_balancing", "host.numa_nodes"),
            _grade_balancing,
        ),
    ),
    Check(
        id="transparent-huge-pages",
        family=Family.HOST,
        title="memory may come in huge pages",
        reads="/sys/kernel/mm/transparent_hugepage/enabled",
        threshold="madvise or always",
        source="the kernel's documentation of transparent huge pages",
        severity=Severity.INFORM,
        fix="As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        needs="",
        why="Large buffers cost more page faults and TLB misses.",
        facts=("host.huge_pages",),
        judge=graded("transparent-huge-pages", ("host.huge_pages",), _grade_huge_pages),
    ),
    Check(
        id="iommu",
        family=Family.HOST,
        title="devices reach each other without translation",
        reads="the type of the IOMMU groups of GPUs and RDMA adapters",
        threshold="identity, on bare metal with two such devices",
        source="NVIDIA's NCCL and GPUDirect documentation",
        severity=Severity.WARN,
        fix="Start the kernel with iommu=pt (ARM: iommu.passthrough=1), or turn the "
        "IOMMU off",
        needs="a GPU, and another one or an RDMA adapter; no virtual machine",
        why="What GPUs and adapters send each other goes through the CPU's root "
        "complex, slower, and on some machines wrong.",
        facts=("host.iommu_translated", "host.is_virtual"),
        judge=graded(
            "iommu", ("host.iommu_translated", "host.is_virtual"), _grade_iommu
        ),
    ),
    Check(
        id="clock-kept",
        family=Family.HOST,
        title="something keeps the clock right",
        reads="adjtimex: whether the kernel takes its clock to be synchronised; and "
        "how far it was measured to be off",
        threshold="synchronised; merely told where it is measured within 100 ms",
        source="adjtimex(2): TIME_ERROR",
        severity=Severity.WARN,
        fix="As root: timedatectl set-ntp true, or start chronyd",
        needs="several hosts",
        why="Logs and traces of several hosts do not fit together, and certificates "
        "and leases end early.",
        facts=("host.is_clock_kept",),
        judge=_judge_clock,
        besides=(_OFFSET,),
    ),
    Check(
        id="kernel-version",
        family=Family.HOST,
        title="all hosts run the same kernel",
        reads="/proc/sys/kernel/osrelease",
        threshold="what most hosts have",
        source="ronde's own: hosts of one cluster come from one image",
        severity=Severity.WARN,
        fix="Give all hosts the same image, and restart those that were updated",
        needs="several hosts",
        why="A host that was left out of an update differs in drivers and limits too.",
        facts=("host.kernel",),
        judge=alike("kernel-version", Severity.WARN, "host.kernel", "kernel"),
    ),
    Check(
        id="kernel-command-line",
        family=Family.HOST,
        title="all kernels were started alike",
        reads="/proc/cmdline, without what names disks, images and addresses",
        threshold="what most hosts have",
        source="ronde's own: hosts of one cluster come from one image",
        severity=Severity.WARN,
        fix="Give all hosts the same options in the boot loader",
        needs="several hosts",
        why="iommu=, mitigations=, isolcpus= and the like change how fast a host is.",
        facts=("host.cmdline",),
        judge=_judge_command_lines,
    ),
    Check(
        id="microcode",
        family=Family.HOST,
        title="all CPUs have the same microcode",
        reads="microcode of the first CPU in /proc/cpuinfo",
        threshold="what most hosts have",
        source="ronde's own: hosts of one cluster come from one image",
        severity=Severity.WARN,
        fix="Update the firmware or the microcode package, and restart",
        needs="several hosts",
        why="Old microcode may be slower, and miscompute.",
        facts=("host.microcode",),
        judge=alike(
            "microcode",
            Severity.WARN,
            "host.microcode",
            "microcode",
            _show_microcode,
        ),
    ),
    Check(
        id="ephemeral-ports",
        family=Family.HOST,
        title="there are ports for all connections",
        reads="/proc/sys/net/ipv4/ip_local_port_range",
        threshold="2 * (145 * hosts + 683), for an all-to-all over all hosts",
        source="AMD's Primus, preflight",
        severity=Severity.WARN,
        fix="As root: sysctl net.ipv4.ip_local_port_range='10000 65535'",
        needs="several hosts",
        why="A connection fails with 'Cannot assign requested address' when many are "
        "opened at once.",
        facts=("host.ephemeral_ports",),
        judge=_judge_ports,
    ),
)
