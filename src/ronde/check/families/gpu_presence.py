"""Whether the GPUs that are there answer, and whether they are what others have."""

import errno
import os
from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity, alike
from ronde.check.facts import Value
from ronde.check.families.gpu_troubles import Trouble, each_gpu, odd_gpus
from ronde.check.fleet import Fleet
from ronde.check.probes.gpu_answers import DEADLINE_S

_CARDS, _MODULE, _FILES = "gpu.cards", "gpu.kernel_module", "gpu.files"
_NVML, _COUNT, _LOST = "gpu.nvml_error", "gpu.count", "gpu.lost"
_TITLES, _CARD_FILE = "gpu.titles", "/dev/nvidia"
_BROKEN = os.strerror(errno.EIO)
_REBOOT = "reboot the host; if it happens again, the GPU or its slot is broken"


def _judge_driver(fleet: Fleet) -> Iterator[Finding]:
    """Tell of hosts whose GPUs cannot be used at all."""
    for facts in fleet.having(_CARDS, _MODULE, _FILES, _NVML):
        cards, module, files, error = (
            facts.values[name] for name in (_CARDS, _MODULE, _FILES, _NVML)
        )
        severity, what, fix = Severity.FAIL, "", ""
        if error and files:
            what = f"NVML does not answer: {error}"
            if "ismatch" in error:
                fix = "reboot: the driver was updated while its module was loaded"
            elif "Not Found" in error:
                fix = "in a container: docker run -e "
                fix += "NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the "
                fix += "driver's libnvidia-ml.so.1"
        elif module and not (files or facts.values.get(_COUNT)):
            # NVML's helper makes files that nobody has needed yet.
            what = "the driver is loaded, but there is no file /dev/nvidia0"
            fix = "docker run --gpus all; on bare metal: sudo nvidia-modprobe -u -c 0"
        elif cards and not module and not files:
            severity = Severity.WARN
            drivers = sorted({each["driver"] or "no driver" for each in cards})
            what = f"{len(cards)} NVIDIA cards without NVIDIA's driver: they have "
            what += ", ".join(drivers)
        if what:
            yield Finding("gpu-answers", severity, facts.host, what, fix=fix)


def _judge_files(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_FILES):
        files: dict[str, str] = facts.values[_FILES]
        cards = {n: why for n, why in files.items() if _is_card(n)}
        # A job that has some of the GPUs may not open the files of the others.
        needed = {n: why for n, why in files.items() if n not in cards}
        # But the driver itself says this: it could not start the GPU.
        needed |= {n: why for n, why in cards.items() if why == _BROKEN}
        if cards and all(cards.values()):
            needed |= cards
        bad = [f"{name} ({why})" for name, why in needed.items() if why]
        if bad:
            what = f"cannot open {', '.join(bad)}"
            fix = _REBOOT if _BROKEN in needed.values() else ""
            yield Finding("gpu-files", Severity.FAIL, facts.host, what, fix=fix)


def _judge_count(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(_FILES, _COUNT):
        files: dict[str, str] = facts.values[_FILES]
        usable = [name for name, why in files.items() if _is_card(name) and not why]
        count = facts.values[_COUNT] or 0
        if count < len(usable):
            what = f"NVML knows {count} GPUs, but {len(usable)} have device files"
            yield Finding("gpu-missing", Severity.FAIL, facts.host, what)


def _is_card(name: str) -> bool:
    return name.removeprefix(_CARD_FILE).isdigit()


def _judge_lost(why: Value) -> Trouble:
    return Trouble(Severity.FAIL, why)


def _judge_models(fleet: Fleet) -> Iterator[Finding]:
    """Tell of hosts with other models; a host without GPUs is told by their number."""
    having = tuple(facts for facts in fleet.having(_TITLES) if facts.values[_TITLES])
    judge = alike("gpu-model", Severity.WARN, _TITLES, "GPUs are", _show_models)
    yield from judge(Fleet(having, fleet.settings))


def _show_models(titles: Value) -> str:
    return ", ".join(sorted({title for title in titles if title}))


_judge_memory = odd_gpus(
    "gpu-memory-size",
    Severity.WARN,
    "gpu.memory_bytes",
    lambda memory: f"{memory['total'] / 2**30:.0f} GiB",
)

CHECKS = (
    Check(
        id="gpu-answers",
        family=Family.GPU,
        title="the GPUs that are there have a driver that answers",
        reads="NVIDIA's cards on the PCI bus, /proc/driver/nvidia/version, "
        "/dev/nvidia*, and NVML's first answer",
        threshold="NVML answers where the driver is loaded or device files exist; "
        "cards without NVIDIA's driver are a warning",
        source="NVIDIA's NVML manual: errors of nvmlInit",
        severity=Severity.FAIL,
        fix="nvidia-smi, and look at what it says; sudo dmesg | grep NVRM",
        needs="an NVIDIA GPU",
        why="CUDA does not start, or training runs on the CPU without a word.",
        facts=(_CARDS, _MODULE, _FILES, _NVML),
        judge=_judge_driver,
    ),
    Check(
        id="gpu-files",
        family=Family.GPU,
        title="the GPUs' device files can be opened",
        reads="/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 and so on: opens them",
        threshold="the common ones and one GPU's open for reading and writing, none "
        f"says '{_BROKEN}'; /dev/nvidia-uvm is not missed where nvidia-modprobe would "
        "make it",
        source="NVIDIA's driver README, chapter on device files",
        severity=Severity.FAIL,
        fix="docker run --gpus all; srun --gres=gpu:N; sudo chmod 666 /dev/nvidia*",
        needs="an NVIDIA GPU",
        why="CUDA says that there is no device, or fails with an unknown error.",
        facts=(_FILES,),
        judge=_judge_files,
    ),
    Check(
        id="gpu-missing",
        family=Family.GPU,
        title="NVML knows every GPU that has a device file",
        reads="the number of GPUs by NVML and of device files that can be opened",
        threshold="no fewer by NVML",
        source="NVIDIA's catalogue of Xid errors: 79, a GPU has fallen off the bus",
        severity=Severity.FAIL,
        fix=_REBOOT,
        needs="an NVIDIA GPU",
        why="A rank has no GPU and the job does not start.",
        facts=(_FILES, _COUNT),
        judge=_judge_count,
    ),
    Check(
        id="gpu-lost",
        family=Family.GPU,
        title="every GPU answers",
        reads="whether NVML says of a GPU that it is lost or needs a reset, cannot "
        "tell its name, or does not answer; each is asked for in a process of its own",
        threshold=f"of none; all questions about it are answered in {DEADLINE_S:g} s",
        source="NVIDIA's NVML manual: errors GPU_IS_LOST and RESET_REQUIRED, and those "
        f"of nvmlDeviceGetHandleByIndex; {DEADLINE_S:g} s: AMD's Primus",
        severity=Severity.FAIL,
        fix=_REBOOT,
        needs="an NVIDIA GPU",
        why="The rank on it fails at its first CUDA call, and the job with it.",
        facts=(_LOST,),
        judge=each_gpu("gpu-lost", _LOST, _judge_lost),
    ),
    Check(
        id="gpu-count",
        family=Family.GPU,
        title="all hosts have the same number of GPUs",
        reads="the number of GPUs by NVML",
        threshold="what most hosts have",
        source="ronde's own: ranks are spread evenly over hosts",
        severity=Severity.FAIL,
        fix="give each host its ranks with -H host:ranks, or find the missing GPU",
        needs="several hosts",
        why="A host gets more ranks than it has GPUs.",
        facts=(_COUNT,),
        judge=alike("gpu-count", Severity.FAIL, _COUNT, "number of GPUs"),
    ),
    Check(
        id="gpu-model",
        family=Family.GPU,
        title="all hosts have the same models of GPUs",
        reads="NVML's names of the GPUs",
        threshold="what most hosts have",
        source="ronde's own: each step waits for the slowest rank",
        severity=Severity.WARN,
        fix="train on hosts of one model",
        needs="several hosts with GPUs",
        why="The faster GPUs wait for the slower at every step.",
        facts=(_TITLES,),
        judge=_judge_models,
    ),
    Check(
        id="gpu-memory-size",
        family=Family.GPU,
        title="GPUs of one model have the same memory",
        reads="NVML's total memory of each GPU",
        threshold="what most GPUs of the model have, in whole GiB",
        source="ronde's own: a batch is divided evenly",
        severity=Severity.WARN,
        fix="nvidia-smi -q -d MEMORY; look for MIG, ECC or retired memory",
        needs="three GPUs of one model",
        why="A model that fits on the others runs out of memory on this one.",
        facts=("gpu.memory_bytes", _TITLES),
        judge=_judge_memory,
    ),
)
