"""Whether GPUs are free and set up for a job of several ranks."""

import re
from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.facts import HostFacts, Value
from ronde.check.families.gpu_troubles import FINE, Trouble, each_gpu, tell
from ronde.check.fleet import Fleet
from ronde.topology.cpu_sets import parse_list

_MAX_USED_BYTES = 2 << 30
_MAX_BUSY_PERCENT = 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENVIRONMENT = "versions.environment"
_PROHIBITED, _EXCLUSIVE = 2, 3
_SERVERS = ("nvidia-cuda-mps",)
"""How the names of programs begin that stand on a GPU for others."""


def _judge_persistence(is_persistent: Value) -> Trouble:
    return FINE if is_persistent else Trouble(Severity.WARN, "persistence mode is off")


def _judge_mig(fleet: Fleet) -> Iterator[Finding]:
    severity = Severity.INFORM if _has_one_rank(fleet) else Severity.FAIL
    trouble = Trouble(severity, "split into instances (MIG)")
    yield from each_gpu("gpu-mig", "gpu.mig", lambda on: trouble if on else FINE)(fleet)


def _has_one_rank(fleet: Fleet) -> bool:
    """Say whether a job would have one rank in all: as many as GPUs unless said."""
    if len(fleet.hosts) > 1:
        return False
    count = fleet.hosts[0].values.get("gpu.count") if fleet.hosts else 0
    return (fleet.settings.get("num_ranks") or count) == 1


def _judge_mode(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("gpu.compute_mode", "gpu.processes"):
        modes = facts.values["gpu.compute_mode"]
        processes = facts.values["gpu.processes"]
        troubles = [
            _judge_access(mode, others or [])
            for mode, others in zip(modes, processes, strict=True)
        ]
        yield from tell("gpu-compute-mode", facts, troubles)


def _judge_access(mode: Value, processes: list[Value]) -> Trouble:
    if mode == _PROHIBITED:
        return Trouble(Severity.FAIL, "its compute mode lets nobody use it")
    if mode == _EXCLUSIVE and _foreign(processes):
        what = f"its compute mode is exclusive, and {_name(processes)} has it"
        return Trouble(Severity.FAIL, what)
    return FINE


def _judge_busy(fleet: Fleet) -> Iterator[Finding]:
    names = ("gpu.memory_bytes", "gpu.processes", "gpu.busy_percent")
    for facts in fleet.having(*names):
        answers = zip(*(facts.values[name] for name in names), strict=True)
        troubles = [_judge_load(*answer) for answer in answers]
        yield from tell("gpu-busy", facts, troubles)


def _judge_load(memory: Value, processes: Value, busy_percent: Value) -> Trouble:
    foreign = _foreign(processes or [])
    if foreign:
        pids = " ".join(str(each["pid"]) for each in foreign)
        fix = f"ps -fp {pids.replace(' ', ',')}; end it if it is yours: kill {pids}"
        return Trouble(Severity.FAIL, f"used by {_name(foreign)}", fix)
    if memory and memory["used"] >= _MAX_USED_BYTES:
        what = f"{memory['used'] / 2**30:.1f} GiB of its memory are used"
        return Trouble(Severity.FAIL, what)
    if (busy_percent or 0) >= _MAX_BUSY_PERCENT:
        return Trouble(Severity.WARN, f"busy to {busy_percent} %")
    return FINE


def _foreign(processes: list[Value]) -> list[Value]:
    return [p for p in processes if not p["command"].startswith(_SERVERS)]


def _name(processes: list[Value]) -> str:
    named = (f"{each['command'] or 'process'} {each['pid']}" for each in processes)
    return ", ".join(named)


def _judge_confidential(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("gpu.is_confidential"):
        if facts.values["gpu.is_confidential"]:
            what = "confidential computing is on"
            yield Finding("gpu-confidential", Severity.WARN, facts.host, what)


def _judge_cpus(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having("gpu.near_cpus", "gpu.own_cpus"):
        own = parse_list(facts.values["gpu.own_cpus"])
        troubles = [
            Trouble(Severity.WARN, f"of the CPUs near it, {near}, none may be used")
            if near and not parse_list(near) & own
            else FINE
            for near in facts.values["gpu.near_cpus"]
        ]
        yield from tell("gpu-cpus", facts, troubles)


def _judge_ranks(fleet: Fleet) -> Iterator[Finding]:
    num_ranks = fleet.settings.get("num_ranks") or 0
    for facts in fleet.having("gpu.count"):
        count = facts.values["gpu.count"] or 0
        visible = _count_visible(facts, count)
        if 0 < visible < num_ranks:
            gpus = "1 GPU" if visible == 1 else f"{visible} GPUs"
            what = f"{num_ranks} ranks would share {gpus}"
            fix = f"run with fewer ranks on this host: -H {facts.host}:{visible}"
            if visible < count:
                what += f" of {count}: {_VISIBLE} hides the others"
                fix = f"unset {_VISIBLE} on this host; or {fix}"
            yield Finding("gpu-ranks", Severity.FAIL, facts.host, what, fix=fix)


def _count_visible(facts: HostFacts, count: int) -> int:
    """Return how many of the GPUs a variable in the environment of ranks leaves."""
    environment: dict[str, str] = facts.values.get(_ENVIRONMENT, {})
    value = environment.get(_VISIBLE)
    if value is None:
        return count
    # Of names that no two hosts share, their number is told instead.
    by_uuid = re.match(r"\d+(?= by UUID)", value)
    named = int(by_uuid[0]) if by_uuid else len(value.split(","))
    return min(count, named if value else 0)


CHECKS = (
    Check(
        id="gpu-ranks",
        family=Family.GPU,
        title="each rank has a GPU to itself",
        reads="the number of GPUs by NVML, how many of them CUDA_VISIBLE_DEVICES "
        "leaves, and of ranks a host as given with --ranks",
        threshold="no more ranks than GPUs",
        source="NCCL refuses two ranks on one GPU: Duplicate GPU detected",
        severity=Severity.FAIL,
        fix="give each host as many ranks as it has GPUs: -H host:GPUS",
        needs="an NVIDIA GPU; --ranks",
        why="NCCL refuses to start.",
        facts=("gpu.count",),
        judge=_judge_ranks,
        besides=(_ENVIRONMENT,),
    ),
    Check(
        id="gpu-busy",
        family=Family.GPU,
        title="nobody else uses the GPUs",
        reads="NVML's computing processes, used memory and utilization of each GPU",
        threshold=f"no process, less than {_MAX_USED_BYTES >> 30} GiB of memory used, "
        f"less than {_MAX_BUSY_PERCENT} % busy; MPS and a desktop's do not count",
        source="AMD Primus, node smoke test",
        severity=Severity.FAIL,
        fix="nvidia-smi, and end what is a leftover of yours",
        needs="an NVIDIA GPU",
        why="Memory runs out, or all ranks wait for the one that shares its GPU.",
        facts=("gpu.memory_bytes", "gpu.processes", "gpu.busy_percent"),
        judge=_judge_busy,
    ),
    Check(
        id="gpu-compute-mode",
        family=Family.GPU,
        title="the GPUs may be used",
        reads="NVML's compute mode and processes",
        threshold="not prohibited; not exclusive while a process has it",
        source="NVIDIA's NVML manual: nvmlComputeMode_t",
        severity=Severity.FAIL,
        fix="sudo nvidia-smi -c 0",
        needs="an NVIDIA GPU",
        why="CUDA says that all devices are busy or unavailable.",
        facts=("gpu.compute_mode", "gpu.processes"),
        judge=_judge_mode,
    ),
    Check(
        id="gpu-mig",
        family=Family.GPU,
        title="no GPU is split into instances (MIG)",
        reads="NVML's MIG mode",
        threshold="off; with one rank in all, as with one GPU, it is only told",
        source="NVIDIA's MIG guide: no peer access between instances",
        severity=Severity.FAIL,
        fix="sudo nvidia-smi -mig 0",
        needs="an NVIDIA GPU from Ampere on",
        why="NCCL cannot join instances of a GPU.",
        facts=("gpu.mig",),
        judge=_judge_mig,
    ),
    Check(
        id="gpu-persistence",
        family=Family.GPU,
        title="the driver stays with GPUs that nobody uses",
        reads="NVML's persistence mode",
        threshold="on",
        source="NVIDIA's manual on driver persistence",
        severity=Severity.WARN,
        fix="sudo systemctl start nvidia-persistenced, or sudo nvidia-smi -pm 1",
        needs="an NVIDIA GPU",
        why="Each start initializes the GPUs anew, for seconds, and resets settings.",
        facts=("gpu.is_persistent",),
        judge=each_gpu("gpu-persistence", "gpu.is_persistent", _judge_persistence),
    ),
    Check(
        id="gpu-confidential",
        family=Family.GPU,
        title="confidential computing is off",
        reads="NVML's state of confidential computing",
        threshold="off",
        source="NVIDIA's guide to confidential computing",
        severity=Severity.WARN,
        fix="use hosts without it, unless the data needs it",
        needs="an NVIDIA GPU from Hopper on",
        why="Peer access and GPUDirect are limited, and copies are encrypted.",
        facts=("gpu.is_confidential",),
        judge=_judge_confidential,
    ),
    Check(
        id="gpu-cpus",
        family=Family.GPU,
        title="CPUs near each GPU may be used",
        reads="NVML's CPU affinity of each GPU, and the CPUs that a program may use",
        threshold="one near CPU at least",
        source="NVIDIA's NVML manual: nvmlDeviceGetCpuAffinity",
        severity=Severity.WARN,
        fix="ask Slurm or the container for CPUs of that NUMA node (--gpu-bind, "
        "--cpuset-cpus)",
        needs="an NVIDIA GPU",
        why="Every copy crosses the link between processors.",
        facts=("gpu.near_cpus", "gpu.own_cpus"),
        judge=_judge_cpus,
    ),
)
