"""Memory of a host: shared, free, swapped out, set aside."""

import shlex

from ronde.check.check import Check, Family, Severity
from ronde.check.families.host_judges import Grade, Values, graded, num_ranks
from ronde.units import format_size

SHARED = "/dev/shm"  # noqa: S108 - it is talked about only
MIN_SHARED_BYTES = 64 << 20
"""Room in /dev/shm with which ranks fail: what Docker gives if nothing is said."""

GOOD_SHARED_BYTES = 8 << 30
USUAL_SHARED_SHARE = 0.4
"""Of the memory that may be taken; Linux gives /dev/shm a half, some of it in use."""

MAX_STALE_SHARE = 0.1
MIN_RANK_BYTES = 256 << 20
GOOD_RANK_BYTES = 1 << 30
MAX_SWAP_BYTES = 1 << 30
MAX_RESERVED_SHARE = 0.1


_SHARED_FACTS = (
    "host.shm_size_bytes",
    "host.shm_free_bytes",
    "host.memory_bytes",
    "host.memory_available_bytes",
)


def _grade_shared_memory(values: Values, _: Values) -> Grade | None:
    size, free = values["host.shm_size_bytes"], values["host.shm_free_bytes"]
    if size == 0:
        return Grade(Severity.FAIL, "there is no /dev/shm")
    if not values.get("host.is_shm_writable", True):
        fix = f"As root: mount -o remount,rw {SHARED} && chmod 1777 {SHARED}"
        return Grade(Severity.FAIL, f"nothing may be written to {SHARED}", fix)
    what = f"{SHARED} has {format_size(free)} free of {format_size(size)}"
    if free <= MIN_SHARED_BYTES:
        return Grade(Severity.FAIL, what)
    # Half of a small machine's memory, or of a small container's, is not little there.
    total, left = values["host.memory_bytes"], values["host.memory_available_bytes"]
    usual = min(total, left) * USUAL_SHARED_SHARE
    if free < min(GOOD_SHARED_BYTES, usual):
        return Grade(Severity.WARN, what)
    return None


def _grade_stale(values: Values, _: Values) -> Grade | None:
    stale, size = values["host.shm_stale"], values["host.shm_size_bytes"]
    if not stale["count"]:
        return None
    is_much = stale["bytes"] > MAX_STALE_SHARE * size
    names = shlex.join(f"{SHARED}/{name}" for name in stale["names"])
    count = stale["count"]
    files = (
        "1 file of an ended job takes"
        if count == 1
        else f"{count} files of ended jobs take"
    )
    return Grade(
        Severity.WARN if is_much else Severity.INFORM,
        f"{files} {format_size(stale['bytes'])} of /dev/shm",
        f"If no container that shares /dev/shm uses them: rm -r {names}",
    )


def _grade_memory(values: Values, settings: Values) -> Grade | None:
    left, wanted = values["host.memory_available_bytes"], num_ranks(settings)
    if left >= GOOD_RANK_BYTES * wanted:
        return None
    is_bad = left < MIN_RANK_BYTES * wanted
    ranks = "1 rank" if wanted == 1 else f"{wanted} ranks"
    return Grade(
        Severity.FAIL if is_bad else Severity.WARN,
        f"{format_size(left)} of memory is free, for {ranks}",
    )


def _grade_oom_kills(values: Values, _: Values) -> Grade | None:
    count = values["host.oom_kills"]
    if count == 0:
        return None
    processes = "a process" if count == 1 else f"{count} processes"
    return Grade(
        Severity.WARN,
        f"the kernel has killed {processes} of this control group for lack of memory",
    )


def _grade_swap(values: Values, _: Values) -> Grade | None:
    used = values["host.swap_used_bytes"]
    if used <= MAX_SWAP_BYTES:
        return None
    return Grade(Severity.WARN, f"{format_size(used)} of memory is swapped out")


def _grade_reserved(values: Values, _: Values) -> Grade | None:
    reserved, total = values["host.huge_pages_free_bytes"], values["host.memory_bytes"]
    if reserved <= MAX_RESERVED_SHARE * total:
        return None
    return Grade(
        Severity.WARN,
        f"{format_size(reserved)} of {format_size(total)} are huge pages that nobody "
        "uses",
    )


CHECKS = (
    Check(
        id="shared-memory",
        family=Family.HOST,
        title=f"{SHARED} has room",
        reads="size and free room of /dev/shm, and whether it may be written to",
        threshold="more than 64MiB; a warning below 8GiB, or below 40 % of the memory "
        "that may be taken where that is less",
        source="Docker gives 64MiB unless told; AMD's Primus asks for 8GiB",
        severity=Severity.FAIL,
        fix="docker run --shm-size 8g, or --ipc=host; in Kubernetes an emptyDir with "
        "medium Memory at /dev/shm; else mount -o remount,size=8g /dev/shm",
        needs="",
        why="Data loaders hand batches over there, and NCCL its buffers: a rank ends "
        "with a bus error.",
        facts=_SHARED_FACTS,
        judge=graded(
            "shared-memory",
            _SHARED_FACTS,
            _grade_shared_memory,
        ),
    ),
    Check(
        id="shared-memory-leftovers",
        family=Family.HOST,
        title="ended jobs left nothing in /dev/shm",
        reads="your files nccl-*, torch_* and ronde* in /dev/shm which no process "
        "that can be seen has open, or has its number in the name",
        threshold="none; a warning above a tenth of /dev/shm",
        source="ronde's own",
        severity=Severity.WARN,
        fix="rm -r them, if no container that shares /dev/shm uses them",
        needs="",
        why="They take memory until the host restarts.",
        facts=("host.shm_stale", "host.shm_size_bytes"),
        judge=graded(
            "shared-memory-leftovers",
            ("host.shm_stale", "host.shm_size_bytes"),
            _grade_stale,
        ),
    ),
    Check(
        id="memory-left",
        family=Family.HOST,
        title="there is memory for the ranks",
        reads="MemAvailable, and the limits of the control groups less what they use",
        threshold="1GiB for each rank; a failure below 256MiB",
        source="ronde's own: a process that has imported torch holds 200 to 500MiB",
        severity=Severity.FAIL,
        fix="End what takes it (ps aux --sort -rss), run fewer ranks, or raise the "
        "limit of the container or job",
        needs="",
        why="The kernel kills the rank that asks for one page too many.",
        facts=("host.memory_available_bytes",),
        judge=graded("memory-left", ("host.memory_available_bytes",), _grade_memory),
    ),
    Check(
        id="oom-kills",
        family=Family.HOST,
        title="nothing was killed here for lack of memory",
        reads="oom_kill in memory.events (memory.oom_control) of the control group",
        threshold="none since the group began",
        source="the kernel's documentation of control groups",
        severity=Severity.WARN,
        fix="Raise the limit of the container or job, or use less: a smaller batch, "
        "fewer workers",
        needs="",
        why="What was killed once for lack of memory is killed again.",
        facts=("host.oom_kills",),
        judge=graded("oom-kills", ("host.oom_kills",), _grade_oom_kills),
    ),
    Check(
        id="swap-used",
        family=Family.HOST,
        title="little is swapped out",
        reads="SwapTotal and SwapFree of /proc/meminfo",
        threshold="1GiB",
        source="ronde's own",
        severity=Severity.WARN,
        fix="End what takes the memory, then as root: swapoff -a && swapon -a",
        needs="",
        why="A rank that waits for a disk makes all others wait.",
        facts=("host.swap_used_bytes",),
        judge=graded("swap-used", ("host.swap_used_bytes",), _grade_swap),
    ),
    Check(
        id="huge-pages-reserved",
        family=Family.HOST,
        title="no memory is set aside and unused",
        reads="HugePages_Free and Hugepagesize of /proc/meminfo",
        threshold="a tenth of the memory",
        source="ronde's own; the kernel's documentation of hugetlbpage",
        severity=Severity.WARN,
        fix="As root: sysctl vm.nr_hugepages=0",
        needs="",
        why="Neither torch nor NCCL uses it, and nobody else can.",
        facts=("host.huge_pages_free_bytes", "host.memory_bytes"),
        judge=graded(
            "huge-pages-reserved",
            ("host.huge_pages_free_bytes", "host.memory_bytes"),
            _grade_reserved,
        ),
    ),
)
