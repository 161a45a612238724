"""Whether GPUs are free and set up for a job of several ranks."""

import re
from collections.abc import Iterator

from ronde.check.check import FAIL, INFORM, WARN, Family, Problem, check, each_host
from ronde.check.facts import Fleet, HostFacts, Value
from ronde.check.gpu.answers import COUNT
from ronde.check.gpu.judges import each_gpu, fold_gpus
from ronde.topology.cpu_sets import parse_list

_MAX_USED_BYTES = 2 << 30
_MAX_BUSY_PERCENT = 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENVIRONMENT = "versions.environment"
_PROHIBITED, _EXCLUSIVE = 2, 3
_SERVERS = ("nvidia-cuda-mps",)
"""How the names of programs begin that stand on a GPU for others."""


@check(
    Family.GPU,
    FAIL,
    """gpu-ranks: each rank has a GPU to itself
    reads: the number of GPUs by NVML, how many of them CUDA_VISIBLE_DEVICES leaves, and
        of ranks a host as given with --ranks
    threshold: no more ranks than GPUs
    source: NCCL refuses two ranks on one GPU: Duplicate GPU detected
    fix: give each host as many ranks as it has GPUs: -H host:GPUS
    needs: an NVIDIA GPU; --ranks
    why: NCCL refuses to start.
    """,
    COUNT,
    besides=(_ENVIRONMENT,),
)
def _gpu_ranks(fleet: Fleet) -> Iterator[Problem]:
    num_ranks = fleet.settings.get("num_ranks") or 0
    for facts in fleet.having(COUNT):
        count = facts.values[COUNT] or 0
        visible = _count_visible(facts, count)
        if 0 < visible < num_ranks:
            gpus = "1 GPU" if visible == 1 else f"{visible} GPUs"
            what = f"{num_ranks} ranks would share {gpus}"
            fix = f"run with fewer ranks on this host: -H {facts.host}:{visible}"
            if visible < count:
                what += f" of {count}: {_VISIBLE} hides the others"
                fix = f"unset {_VISIBLE} on this host; or {fix}"
            yield Problem(what, fix=fix, host=facts.host)


def _count_visible(facts: HostFacts, count: int) -> int:
    """Return how many of the GPUs a variable in the environment of ranks leaves."""
    environment: dict[str, str] = facts.values.get(_ENVIRONMENT, {})
    value = environment.get(_VISIBLE)
    if value is None:
        return count
    # Of names that no two hosts share, only their number is known.
    by_uuid = re.match(r"\d+(?= by UUID)", value)
    named = int(by_uuid[0]) if by_uuid else len(value.split(","))
    return min(count, named if value else 0)


def _foreign(processes: list[Value]) -> list[Value]:
    return [p for p in processes if not p["command"].startswith(_SERVERS)]


def _name(processes: list[Value]) -> str:
    named = (f"{each['command'] or 'process'} {each['pid']}" for each in processes)
    return ", ".join(named)


@each_gpu(
    FAIL,
    f"""gpu-busy: nobody else uses the GPUs
    reads: NVML's computing processes, used memory and utilization of each GPU
    threshold: no process, less than {_MAX_USED_BYTES >> 30} GiB of memory used, less
        than {_MAX_BUSY_PERCENT} % busy; MPS and a desktop's do not count
    source: AMD Primus, node smoke test
    fix: nvidia-smi, and end what is a leftover of yours
    needs: an NVIDIA GPU
    why: Memory runs out, or all ranks wait for the one that shares its GPU.
    """,
    "gpu.memory_bytes",
    "gpu.processes",
    "gpu.busy_percent",
)
def _gpu_busy(memory: Value, processes: Value, percent: Value) -> Iterator[Problem]:
    if foreign := _foreign(processes or []):
        pids = " ".join(str(each["pid"]) for each in foreign)
        fix = f"ps -fp {pids.replace(' ', ',')}; end it if it is yours: kill {pids}"
        yield Problem(f"used by {_name(foreign)}", fix=fix)
    if memory and memory["used"] >= _MAX_USED_BYTES:
        yield Problem(f"{memory['used'] / 2**30:.1f} GiB of its memory are used")
    if (percent or 0) >= _MAX_BUSY_PERCENT:
        yield Problem(f"busy to {percent} %", WARN)


@each_gpu(
    FAIL,
    """gpu-compute-mode: the GPUs may be used
    reads: NVML's compute mode and processes
    threshold: not prohibited; not exclusive while a process has it
    source: NVIDIA's NVML manual: nvmlComputeMode_t
    fix: sudo nvidia-smi -c 0
    needs: an NVIDIA GPU
    why: CUDA reports that all devices are busy or unavailable.
    """,
    "gpu.compute_mode",
    "gpu.processes",
)
def _gpu_compute_mode(mode: Value, processes: Value) -> Iterator[Problem]:
    if mode == _PROHIBITED:
        yield Problem("its compute mode lets nobody use it")
    elif mode == _EXCLUSIVE and _foreign(processes or []):
        yield Problem(f"its compute mode is exclusive, and {_name(processes)} has it")


@check(
    Family.GPU,
    FAIL,
    """gpu-mig: no GPU is split into instances (MIG)
    reads: NVML's MIG mode
    threshold: off; with one rank in all, as with one GPU, it is only shown
    source: NVIDIA's MIG guide: no peer access between instances
    fix: sudo nvidia-smi -mig 0
    needs: an NVIDIA GPU from Ampere on
    why: NCCL cannot join instances of a GPU.
    """,
    "gpu.mig",
)
def _gpu_mig(fleet: Fleet) -> Iterator[Problem]:
    count = fleet.hosts[0].values.get(COUNT) if len(fleet.hosts) == 1 else 0
    is_alone = count and (fleet.settings.get("num_ranks") or count) == 1
    split = Problem("split into instances (MIG)", INFORM if is_alone else FAIL)
    for host, gpus in fleet.known("gpu.mig").items():
        yield from fold_gpus(host, (split if is_on else None for is_on in gpus))


@each_gpu(
    WARN,
    """gpu-persistence: the driver stays with GPUs that nobody uses
    reads: NVML's persistence mode
    threshold: on
    source: NVIDIA's manual on driver persistence
    fix: sudo systemctl start nvidia-persistenced, or sudo nvidia-smi -pm 1
    needs: an NVIDIA GPU
    why: Each start initializes the GPUs anew, for seconds, and resets settings.
    """,
    "gpu.is_persistent",
)
def _gpu_persistence(is_persistent: Value) -> Iterator[Problem]:
    if not is_persistent:
        yield Problem("persistence mode is off")


@each_host(
    Family.GPU,
    WARN,
    """gpu-cpus: CPUs near each GPU may be used
    reads: NVML's CPU affinity of each GPU, and the CPUs that a program may use
    threshold: one near CPU at least
    source: NVIDIA's NVML manual: nvmlDeviceGetCpuAffinity
    fix: ask Slurm or the container for CPUs of that NUMA node (--gpu-bind,
        --cpuset-cpus)
    needs: an NVIDIA GPU
    why: Every copy crosses the link between processors.
    """,
    "gpu.near_cpus",
    "gpu.own_cpus",
)
def _gpu_cpus(values: Value, _: Fleet) -> Iterator[Problem]:
    own = parse_list(values["gpu.own_cpus"])
    found = (
        Problem(f"of the CPUs near it, {near}, none may be used")
        if near and not parse_list(near) & own
        else None
        for near in values["gpu.near_cpus"]
    )
    yield from fold_gpus("", found)
