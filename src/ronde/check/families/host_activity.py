"""What else runs on a host, what hangs there, and whether ranks can be looked into."""

from ronde.check.check import Check, Family, Severity
from ronde.check.families.host_judges import Grade, Values, graded

MUCH_LOAD = 2.0
"""Processes that want to run, for each CPU."""

MAX_BLOCKED_S = 60.0
FOREIGN_ALLOWED = 0
ONLY_ADMINISTRATOR = 2


def _grade_load(values: Values, _: Values) -> Grade | None:
    load, cpus = values["host.load_5m"], values["host.num_cpus_online"]
    if cpus == 0 or load <= cpus:
        return None
    busy = [f"{p['name']} ({p['pid']}) {p['cpus']:g}" for p in values["host.busy"]]
    told = f"; CPUs kept busy now: {', '.join(busy)}" if busy else ""
    return Grade(
        Severity.WARN if load > MUCH_LOAD * cpus else Severity.INFORM,
        f"load {load:g} on {cpus} CPUs in the last 5 minutes{told}",
    )


def _grade_blocked(values: Values, _: Values) -> Grade | None:
    hanging = [p for p in values["host.blocked"] if p["seconds"] > MAX_BLOCKED_S]
    if not hanging:
        return None
    told = ", ".join(f"{p['name']} ({p['pid']}, {p['seconds']:.0f} s)" for p in hanging)
    return Grade(Severity.WARN, f"hung in the kernel: {told}")


def _grade_tracing(values: Values, _: Values) -> Grade | None:
    if not values["host.can_read_child"]:
        return Grade(
            Severity.WARN, "no process may look into another, not even its own"
        )
    scope = values["host.ptrace_scope"]
    if scope == FOREIGN_ALLOWED or "sys_ptrace" in values["host.capabilities"]:
        return None
    who = "root" if scope >= ONLY_ADMINISTRATOR else "its parents"
    return Grade(
        Severity.INFORM,
        f"only {who} may look into a process (kernel.yama.ptrace_scope {scope})",
    )


CHECKS = (
    Check(
        id="load",
        family=Family.HOST,
        title="nothing else keeps the CPUs busy",
        reads="the load of the last 5 minutes, and who uses CPUs now",
        threshold="told above one for each CPU, a warning above two",
        source="ronde's own; gpud looks at the load as well",
        severity=Severity.WARN,
        fix="End what runs there, or take the host out of the job",
        needs="",
        why="Ranks wait for CPUs, and all others for them.",
        facts=("host.load_5m", "host.num_cpus_online", "host.busy"),
        judge=graded(
            "load", ("host.load_5m", "host.num_cpus_online", "host.busy"), _grade_load
        ),
    ),
    Check(
        id="blocked-processes",
        family=Family.HOST,
        title="nothing hangs in the kernel",
        reads="processes in state D in two looks, and when each last ran "
        "(/proc/PID/sched)",
        threshold="60 s",
        source="gpud warns at 60 s",
        severity=Severity.WARN,
        fix="Look at what it waits for: as root cat /proc/PID/stack; a dead file "
        "server or a hung driver, and mostly a restart",
        needs="",
        why="What hangs one process in a driver or file system hangs a rank as well.",
        facts=("host.blocked",),
        judge=graded("blocked-processes", ("host.blocked",), _grade_blocked),
    ),
    Check(
        id="tracing",
        family=Family.HOST,
        title="a profiler may look into ranks",
        reads="kernel.yama.ptrace_scope, the capability to trace, and whether a "
        "child's memory can be read",
        threshold="a child can be looked into; a scope above 0 is told",
        source="the kernel's documentation of Yama; ptrace(2)",
        severity=Severity.WARN,
        fix="docker run --cap-add SYS_PTRACE; else as root: "
        "sysctl kernel.yama.ptrace_scope=0",
        needs="",
        why="Of a rank that hangs nobody can see where; training itself does not "
        "need it.",
        facts=("host.can_read_child", "host.ptrace_scope", "host.capabilities"),
        judge=graded(
            "tracing",
            ("host.can_read_child", "host.ptrace_scope", "host.capabilities"),
            _grade_tracing,
        ),
    ),
)
