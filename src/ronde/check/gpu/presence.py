"""Checks that GPUs answer, are the same on all hosts, work with torch and are idle."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ronde.check.check import FAIL, INFORM, WARN, Problem, Problems, check, each_host
from ronde.check.fleet import Fleet, Value, Values
from ronde.check.gpu.links import read_acs, read_direct_rdma, read_is_virtual
from ronde.check.gpu.nvml import COUNT, LOST, ask_driver, each_gpu, fold_gpus, odd_gpus
from ronde.check.gpu.xids import read_xids
from ronde.check.majority import differing, same_everywhere, spell
from ronde.check.probing import FactReader
from ronde.check.software import read_module
from ronde.topology.kernel_files import list_names
from ronde.topology.pci import is_gpu, read_link
from ronde.topology.probes.sysfs import read_functions

_CARDS, _MODULE, _FILES = "gpu.cards", "gpu.kernel_module", "gpu.files"
_NVML = "gpu.nvml_error"
_BROKEN = os.strerror(errno.EIO)
_NVIDIA = 0x10DE
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
_CARD = re.compile(r"(/dev/)?nvidia\d+")
_NVML_CURES = {
    "ismatch": "reboot: the driver was updated while its module was loaded",
    "Not Found": "in a container: docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,"
    "utility; else install the driver's libnvidia-ml.so.1",
}
_MAX_USED_BYTES = 2 << 30
_MAX_BUSY_PERCENT = 20
_BUILD = "versions.torch_build"
_SERVER = "nvidia-cuda-mps"  # the MPS server uses GPUs on behalf of other programs


def read(reader: FactReader) -> None:
    """Read the facts ``gpu.*``; without NVIDIA's driver ``gpu.count`` is 0."""
    root = reader.root
    cards, module = read_cards(root), read_module(root)
    with opened_files(root) as files:
        reader.values |= {_CARDS: cards, _MODULE: module, _FILES: files, _NVML: ""}
        if not (module or files):
            # ``gpu-answers`` reports cards without a driver.
            reader.values[COUNT] = 0
            return
        if not root:
            ask_driver(reader)
    reader.store("gpu.is_virtual", lambda: read_is_virtual(root))
    reader.store("gpu.xids", lambda: read_xids(root))
    reader.store("gpu.direct_rdma", lambda: read_direct_rdma(root, module))
    addresses = [each["address"] for each in cards]
    reader.store("gpu.acs", lambda: read_acs(root, addresses))


def read_cards(root: str) -> list[Value]:
    """Return the PCI address and the driver (or "") of each NVIDIA card."""
    found: list[Value] = []
    for address, each in read_functions(root).items():
        if each.vendor == _NVIDIA and is_gpu(each.class_code, each.vendor):
            driver = read_link(f"{root}/sys/bus/pci/devices/{address}/driver")
            found.append({"address": address, "driver": driver.rpartition("/")[2]})
    return found


@contextmanager
def opened_files(root: str) -> Generator[dict[str, str]]:
    """Hold the device files of all GPUs open, and yield the error of each file.

    The error is empty if the file was opened. Without persistence mode the driver
    initialises a GPU when its file is first opened, which takes seconds, and stops it
    when the last handle is closed. Opening all files initialises all GPUs concurrently.
    """
    names = [name for name in list_names(f"{root}/dev") if _CARD.fullmatch(name)]
    if names:
        names.append("nvidiactl")
        # If this program is installed, CUDA creates nvidia-uvm itself.
        if not os.path.exists(f"{root}/usr/bin/nvidia-modprobe"):  # noqa: PTH110
            names.append("nvidia-uvm")
    with ExitStack() as closing:
        yield {f"/dev/{name}": _open(f"{root}/dev/{name}", closing) for name in names}


def _open(path: str, closing: ExitStack) -> str:
    try:
        closing.callback(os.close, os.open(path, _OPENING))
    except OSError as error:
        return error.strerror or str(error)
    return ""


@each_host(FAIL, _CARDS, _MODULE, _FILES, _NVML)
def gpu_answers(values: Values, _: Fleet) -> Problems:
    """Every GPU has a driver that answers.

    reads: NVIDIA cards on the PCI bus, their drivers and device files, and NVML's first
        answer
    threshold: NVML answers if the driver is loaded or device files exist; cards without
        NVIDIA's driver are a warning
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): errors of nvmlInit_v2
    fix: run nvidia-smi and read its error; sudo dmesg | grep NVRM
    pod: Give the container nvidia.com/gpu under resources.limits (ronde kubernetes
        --gpus N), and its image ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility; then
        read nvidia-smi there
    needs: an NVIDIA GPU
    why: CUDA does not start, or training silently runs on the CPU.
    """
    cards, module, files, error = (values[n] for n in (_CARDS, _MODULE, _FILES, _NVML))
    if error and files:
        fix = next((cure for word, cure in _NVML_CURES.items() if word in error), "")
        yield Problem(f"NVML does not answer: {error}", fix=fix)
    elif module and not (files or values.get(COUNT)):
        message = "the driver is loaded, but there is no file /dev/nvidia0"
        fix = "docker run --gpus all; on bare metal: sudo nvidia-modprobe -u -c 0"
        yield Problem(message, fix=fix)
    elif cards and not module and not files:
        drivers = ", ".join(sorted({each["driver"] or "no driver" for each in cards}))
        message = (
            f"{len(cards)} NVIDIA cards without NVIDIA's driver: they have {drivers}"
        )
        yield Problem(message, WARN)


@each_host(FAIL, _FILES)
def gpu_files(values: Values, _: Fleet) -> Problems:
    """The GPUs' device files can be opened.

    reads: the result of opening /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 and so on
    threshold: the common files and the file of at least one GPU can be opened, and none
        fails with 'Input/output error'
    source: NVIDIA's driver README, FAQ: device files are created with mode 0666
    fix: docker run --gpus all; srun --gres=gpu:N; sudo chmod 666 /dev/nvidiactl
        /dev/nvidia-uvm /dev/nvidia[0-9]*
    pod: Give the container nvidia.com/gpu under resources.limits (ronde kubernetes
        --gpus N)
    needs: an NVIDIA GPU
    why: CUDA reports no device, or fails with an unknown error.
    """
    files: dict[str, str] = values[_FILES]
    cards = {name: why for name, why in files.items() if _CARD.fullmatch(name)}
    # A job with some of the GPUs may not open the files of the others. But _BROKEN
    # means that the driver could not start the GPU.
    needed = {n: why for n, why in files.items() if n not in cards or why == _BROKEN}
    if cards and all(cards.values()):
        needed |= cards
    bad = [f"{name} ({why})" for name, why in needed.items() if why]
    if bad:
        is_broken = _BROKEN in needed.values()
        names = " ".join(name for name, why in needed.items() if why)
        fix = f"sudo chmod 666 {names}  # or docker run --gpus all, or srun "
        fix += f"--gres=gpu:{len(cards)}"
        message = f"cannot open {', '.join(bad)}"
        yield Problem(message, fix=gpu_lost.fix if is_broken else fix)


@check(FAIL, LOST, _FILES, COUNT)
def gpu_lost(fleet: Fleet) -> Problems:
    """No GPU is lost or hangs.

    reads: NVML's answers for each GPU, in its own process, and the device files
    threshold: no GPU is reported as lost or in need of a reset, has no name, or takes
        more than 15 s for all answers; and NVML finds at least as many GPUs as there
        are device files
    source: NVIDIA's nvml.h 13 (go-nvml 2f9e261): GPU_IS_LOST, RESET_REQUIRED; 15 s:
        AMD's Primus fd1eeab (preflight/node_smoke/cli.py); ronde's choice: the device
        files
    fix: reboot the host; if it happens again, the GPU or its slot is broken
    needs: an NVIDIA GPU
    why: A rank on this GPU fails at its first CUDA call, and so does the job.
    """
    for host in fleet.having(LOST, _FILES, COUNT):
        lost: list[str] = host.values[LOST]
        yield from fold_gpus(host.host, (Problem(w) if w else None for w in lost))
        files: dict[str, str] = host.values[_FILES]
        num_files = sum(not why for n, why in files.items() if _CARD.fullmatch(n))
        count = host.values[COUNT] or 0
        if count < num_files:
            message = f"NVML knows {count} GPUs, but {num_files} have device files"
            yield Problem(message, host=host.host)


@same_everywhere(FAIL, COUNT, "number of GPUs")
def gpu_count(count: Value) -> str:
    """All hosts have the same number of GPUs.

    reads: the number of GPUs in NVML
    threshold: the number of most hosts
    source: ronde's choice: all hosts get the same number of ranks
    fix: give each host its number of ranks with -H host:ranks, or find the missing GPU
    needs: several hosts
    why: A host gets more ranks than it has GPUs.
    """
    return spell(count)


@check(WARN, "gpu.titles")
def gpu_model(fleet: Fleet) -> Problems:
    """All hosts have the same models of GPUs with the same memory.

    reads: the name and the total memory of each GPU in NVML
    threshold: the models of most hosts; the memory of most GPUs of the model, in whole
        GiB
    source: ronde's choice: each step waits for the slowest rank
    fix: train on hosts of one model; nvidia-smi -q -d MEMORY: look for MIG, ECC or
        retired memory
    needs: several hosts with GPUs
    why: Faster GPUs wait for slower ones; a model may not fit into the smaller GPUs.
    """
    titles, memory = "gpu.titles", "gpu.memory_bytes"
    # ``gpu-count`` reports hosts without GPUs.
    having = tuple(facts for facts in fleet.having(titles) if facts.values[titles])
    equipped = fleet._replace(hosts=having)
    yield from differing(
        equipped,
        titles,
        "GPUs are",
        lambda own: ", ".join(sorted({*filter(None, own)})),
    )
    yield from odd_gpus(fleet, memory, lambda m: f"{m['total'] / 2**30:.0f} GiB", WARN)


@each_host(FAIL, COUNT, _BUILD)
def gpu_torch(values: Values, _: Fleet) -> Problems:
    """Torch can use the GPUs.

    reads: the build of torch in its version.py, and the number of GPUs
    threshold: a CUDA build if there are NVIDIA GPUs
    source: version.py of torch: cuda is None in builds for CPUs
    fix: python -m pip install --force-reinstall torch: on Linux the package index has
        builds for CUDA. pytorch.org/get-started/locally names the index of each CUDA
        version
    needs: an NVIDIA GPU
    why: Training runs on the CPU, many times slower.
    """
    if (count := values[COUNT]) and values[_BUILD] == "CPU":
        yield Problem(f"torch was built without CUDA, and there are {count} GPUs")


@each_host(FAIL, "gpu.cuda_version", _BUILD)
def gpu_cuda(values: Values, _: Fleet) -> Problems:
    """The driver supports the CUDA version that torch was built for.

    reads: the CUDA version in NVML, and that of torch in its version.py
    threshold: at least torch's version; an older minor version is only a warning
    source: NVIDIA's CUDA Compatibility R590, Minor Version Compatibility
    fix: install a newer driver, or a torch built for an older CUDA version
    needs: an NVIDIA GPU
    why: CUDA does not start: the driver version is insufficient for the runtime
        version.
    """
    match = re.fullmatch(r"CUDA (\d+)\.(\d+).*", values[_BUILD])
    driver = values["gpu.cuda_version"]
    if match and driver and tuple(driver) < (int(match[1]), int(match[2])):
        has = f"the driver supports CUDA {driver[0]}.{driver[1]}"
        message = f"{has}, torch was built for {match[1]}.{match[2]}"
        yield Problem(message, FAIL if driver[0] < int(match[1]) else WARN)


@each_gpu(FAIL, "gpu.memory_bytes", "gpu.processes", "gpu.busy_percent")
def gpu_busy(memory: Value, processes: Value, percent: Value) -> Problems:
    """No other program uses the GPUs.

    reads: compute processes, used memory and utilization of each GPU in NVML
    threshold: no process except MPS and a desktop's, less than 2 GiB used, and below 20
        % busy
    source: AMD's Primus fd1eeab (preflight/node_smoke/cli.py)
    fix: nvidia-smi; end processes that are left over from your own jobs
    needs: an NVIDIA GPU
    why: Memory runs out, or all ranks wait for the rank that shares its GPU.
    """
    foreign = [p for p in processes or () if not p["command"].startswith(_SERVER)]
    if foreign:
        names = ", ".join(f"{p['command'] or 'process'} {p['pid']}" for p in foreign)
        pids = [str(each["pid"]) for each in foreign]
        fix = f"ps -fp {','.join(pids)}; end it if it is yours: kill {' '.join(pids)}"
        yield Problem(f"used by {names}", fix=fix)
    if memory and memory["used"] >= _MAX_USED_BYTES:
        yield Problem(f"{memory['used'] / 2**30:.1f} GiB of its memory is used")
    if (percent or 0) >= _MAX_BUSY_PERCENT:
        yield Problem(f"{percent} % busy", WARN)


@check(FAIL, "gpu.mig")
def gpu_mig(fleet: Fleet) -> Problems:
    """No GPU is split into instances (MIG).

    reads: the MIG mode in NVML
    threshold: off; only a note for a job of one rank, such as on a host with one GPU
    source: NVIDIA's MIG guide: no peer access between instances; NCCL 2.32's manual:
        experimental support for instances since 2.31, without NVLinks
    fix: stop all programs on the GPU, then: sudo nvidia-smi -i N -mig 0  # removes all
        its instances
    needs: an NVIDIA GPU from Ampere on
    why: NCCL up to 2.30 cannot connect instances; later versions copy through host
        memory.
    """
    count = fleet.hosts[0].values.get(COUNT) if len(fleet.hosts) == 1 else 0
    is_alone = count and (fleet.settings.get("num_ranks") or count) == 1
    severity = INFORM if is_alone else FAIL
    split = Problem("split into instances (MIG)", severity, fix=gpu_mig.fix)
    for host, gpus in fleet.known("gpu.mig").items():
        yield from fold_gpus(host, (split if is_on else None for is_on in gpus))
