"""Whether torch, CUDA and the driver fit the GPUs, and whether ranks may use them."""

import re
from collections.abc import Sequence

from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    Family,
    Problem,
    Problems,
    check,
    each_host,
)
from ronde.check.facts import Fleet, HostFacts, Value, Values
from ronde.check.gpu.judges import each_gpu, fold_gpus
from ronde.check.gpu.nvml import COUNT

_MAX_USED_BYTES = 2 << 30
_MAX_BUSY_PERCENT = 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUILD, _ENVIRONMENT = "versions.torch_build", "versions.environment"
_SERVERS = ("nvidia-cuda-mps",)
"""How the names of programs begin that stand on a GPU for others."""


@each_host(Family.GPU, FAIL, COUNT, _BUILD)
def gpu_torch(values: Values, _: Fleet) -> Problems:
    """Torch can use the GPUs that are there.

    reads: what torch was built for, in its version.py, and the number of GPUs
    threshold: for CUDA where there are NVIDIA GPUs
    source: torch.version.cuda is None in builds for CPUs
    fix: pip install --force-reinstall torch --index-url
        https://download.pytorch.org/whl/cu128
    needs: an NVIDIA GPU
    why: Training runs on the CPU, a hundred times slower.
    """
    if values[COUNT] and values[_BUILD] == "CPU":
        count = values[COUNT]
        yield Problem(f"torch was built without CUDA, and there are {count} GPUs")


@each_host(Family.GPU, FAIL, "gpu.cuda_version", _BUILD)
def gpu_cuda(values: Values, _: Fleet) -> Problems:
    """The driver supports the CUDA that torch was built for.

    reads: NVML's CUDA version, and torch's in its version.py
    threshold: at least torch's; an older minor version is a warning, an older major one
        does not work
    source: NVIDIA's CUDA compatibility manual
    fix: install a newer driver, or a torch for an older CUDA
    needs: an NVIDIA GPU
    why: CUDA does not start: the driver is insufficient for the runtime.
    """
    match = re.fullmatch(r"CUDA (\d+)\.(\d+).*", values[_BUILD])
    driver = values["gpu.cuda_version"]
    if match and driver and tuple(driver) < (int(match[1]), int(match[2])):
        yield Problem(
            f"the driver supports CUDA {driver[0]}.{driver[1]}, torch was built for "
            f"{match[1]}.{match[2]}",
            FAIL if driver[0] < int(match[1]) else WARN,
        )


@check(Family.GPU, FAIL, COUNT, besides=(_ENVIRONMENT,))
def gpu_ranks(fleet: Fleet) -> Problems:
    """Each rank has a GPU to itself.

    reads: the number of GPUs by NVML, how many of them CUDA_VISIBLE_DEVICES leaves, and
        of ranks a host as given with --ranks
    threshold: no more ranks than GPUs
    source: NCCL refuses two ranks on one GPU: Duplicate GPU detected
    fix: give each host as many ranks as it has GPUs: -H host:GPUS
    needs: an NVIDIA GPU; --ranks
    why: NCCL refuses to start.
    """
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
    value = facts.values.get(_ENVIRONMENT, {}).get(_VISIBLE)
    if value is None:
        return count
    # Of names that no two hosts share, only their number is known.
    by_uuid = re.match(r"\d+(?= by UUID)", value)
    named = int(by_uuid[0]) if by_uuid else len(value.split(","))
    return min(count, named if value else 0)


def _foreign(processes: Sequence[Value]) -> list[Value]:
    return [p for p in processes if not p["command"].startswith(_SERVERS)]


def _name(processes: Sequence[Value]) -> str:
    return ", ".join(f"{p['command'] or 'process'} {p['pid']}" for p in processes)


@each_gpu(FAIL, "gpu.memory_bytes", "gpu.processes", "gpu.busy_percent")
def gpu_busy(memory: Value, processes: Value, percent: Value) -> Problems:
    """Nobody else uses the GPUs.

    reads: NVML's computing processes, used memory and utilization of each GPU
    threshold: no process, less than 2 GiB of memory used, less than 20 % busy; MPS and
        a desktop's do not count
    source: AMD Primus, node smoke test
    fix: nvidia-smi, and end what is a leftover of yours
    needs: an NVIDIA GPU
    why: Memory runs out, or all ranks wait for the one that shares its GPU.
    """
    if foreign := _foreign(processes or ()):
        pids = " ".join(str(each["pid"]) for each in foreign)
        fix = f"ps -fp {pids.replace(' ', ',')}; end it if it is yours: kill {pids}"
        yield Problem(f"used by {_name(foreign)}", fix=fix)
    if memory and memory["used"] >= _MAX_USED_BYTES:
        yield Problem(f"{memory['used'] / 2**30:.1f} GiB of its memory are used")
    if (percent or 0) >= _MAX_BUSY_PERCENT:
        yield Problem(f"busy to {percent} %", WARN)


@check(Family.GPU, FAIL, "gpu.mig")
def gpu_mig(fleet: Fleet) -> Problems:
    """No GPU is split into instances (MIG).

    reads: NVML's MIG mode
    threshold: off; with one rank in all, as with one GPU, it is only shown
    source: NVIDIA's MIG guide: no peer access between instances
    fix: sudo nvidia-smi -mig 0
    needs: an NVIDIA GPU from Ampere on
    why: NCCL cannot join instances of a GPU.
    """
    count = fleet.hosts[0].values.get(COUNT) if len(fleet.hosts) == 1 else 0
    is_alone = count and (fleet.settings.get("num_ranks") or count) == 1
    split = Problem("split into instances (MIG)", INFORM if is_alone else FAIL)
    for host, gpus in fleet.known("gpu.mig").items():
        yield from fold_gpus(host, (split if is_on else None for is_on in gpus))
