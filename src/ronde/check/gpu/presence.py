"""Whether the GPUs that are there answer, and whether they are what others have."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from ronde.check.check import (
    FAIL,
    WARN,
    Family,
    Problem,
    Problems,
    check,
    differing,
    each_host,
    same_everywhere,
)
from ronde.check.facts import FactReader, Fleet, Value, Values, spell
from ronde.check.gpu.judges import fold_gpus, odd_gpus
from ronde.check.gpu.kernel_log import read_xids
from ronde.check.gpu.links import read_acs, read_direct_rdma, read_is_virtual
from ronde.check.gpu.nvml import COUNT, LOST, ask_driver
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.pci import is_gpu, read_link
from ronde.topology.probes.sysfs import read_functions

_CARDS, _MODULE, _FILES = "gpu.cards", "gpu.kernel_module", "gpu.files"
_NVML = "gpu.nvml_error"
_BROKEN = os.strerror(errno.EIO)
_NVIDIA = 0x10DE
_OPENING = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
_CARD = re.compile(r"(/dev/)?nvidia\d+")
_VERSION = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


def read(reader: FactReader) -> None:
    """Read all facts ``gpu.*``.

    A host without a driver for NVIDIA's GPUs has ``gpu.count`` 0 and no answers.
    """
    root = reader.root
    cards, module = read_cards(root), read_module(root)
    with opened_files(root) as files:
        reader.values |= {_CARDS: cards, _MODULE: module, _FILES: files, _NVML: ""}
        if not (module or files):
            # What cards there are then stand idle, and one finding says so.
            reader.values[COUNT] = 0
            return
        if not root:
            ask_driver(reader)
    reader.keep("gpu.is_virtual", lambda: read_is_virtual(root))
    reader.keep("gpu.xids", lambda: read_xids(root))
    reader.keep("gpu.direct_rdma", lambda: read_direct_rdma(root, module))
    addresses = [each["address"] for each in cards]
    reader.keep("gpu.acs", lambda: read_acs(root, addresses))


def read_cards(root: str) -> list[Value]:
    """Return ``address`` and ``driver``, empty for none, of each card on the bus."""
    devices = f"{root}/sys/bus/pci/devices"
    return [
        {
            "address": address,
            "driver": read_link(f"{devices}/{address}/driver").rpartition("/")[2],
        }
        for address, each in read_functions(root).items()
        if each.vendor == _NVIDIA and is_gpu(each.class_code, each.vendor)
    ]


def read_module(root: str) -> str:
    """Return the version of the kernel's module; empty if it is not loaded."""
    text = read_text(f"{root}/proc/driver/nvidia/version")
    match = _VERSION.search(text)
    if match is None:
        return ""
    return f"{match[1]} (open)" if "Open Kernel Module" in text else match[1]


@contextmanager
def opened_files(root: str) -> Generator[dict[str, str]]:
    """Open the device files; give why each cannot be opened, empty for one that is.

    They stay open meanwhile. Where nobody uses the GPUs and the driver is not
    persistent, it starts each of them, which takes seconds, when its file is opened,
    all at once in the background, and stops each again when the last one is closed.
    """
    names = [name for name in list_names(f"{root}/dev") if _CARD.fullmatch(name)]
    if names:
        names.append("nvidiactl")
        # With its helper, CUDA makes this one as soon as it needs it.
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


@each_host(Family.GPU, FAIL, _CARDS, _MODULE, _FILES, _NVML)
def gpu_answers(values: Values, _: Fleet) -> Problems:
    """The GPUs that are there have a driver that answers.

    reads: NVIDIA's cards on the PCI bus, /proc/driver/nvidia/version, /dev/nvidia*, and
        NVML's first answer
    threshold: NVML answers where the driver is loaded or device files exist; cards
        without NVIDIA's driver are a warning
    source: NVIDIA's NVML manual: errors of nvmlInit
    fix: nvidia-smi, and read its error; sudo dmesg | grep NVRM
    needs: an NVIDIA GPU
    why: CUDA does not start, or training silently runs on the CPU.
    """
    cards, module, files, error = (values[n] for n in (_CARDS, _MODULE, _FILES, _NVML))
    if error and files:
        fix = ""
        if "ismatch" in error:
            fix = "reboot: the driver was updated while its module was loaded"
        elif "Not Found" in error:
            fix = (
                "in a container: docker run -e "
                "NVIDIA_DRIVER_CAPABILITIES=compute,utility; else install the driver's "
                "libnvidia-ml.so.1"
            )
        yield Problem(f"NVML does not answer: {error}", fix=fix)
    elif module and not (files or values.get(COUNT)):
        # NVML's helper makes files that nobody has needed yet.
        what = "the driver is loaded, but there is no file /dev/nvidia0"
        fix = "docker run --gpus all; on bare metal: sudo nvidia-modprobe -u -c 0"
        yield Problem(what, fix=fix)
    elif cards and not module and not files:
        drivers = ", ".join(sorted({each["driver"] or "no driver" for each in cards}))
        what = f"{len(cards)} NVIDIA cards without NVIDIA's driver: they have {drivers}"
        yield Problem(what, WARN)


@each_host(Family.GPU, FAIL, _FILES)
def gpu_files(values: Values, _: Fleet) -> Problems:
    """The GPUs' device files can be opened.

    reads: /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 and so on: opens them
    threshold: the common ones and one GPU's open for reading and writing, none with
        'Input/output error'; /dev/nvidia-uvm may be absent where nvidia-modprobe would
        make it
    source: NVIDIA's driver README, chapter on device files
    fix: docker run --gpus all; srun --gres=gpu:N; sudo chmod 666 /dev/nvidia*
    needs: an NVIDIA GPU
    why: CUDA reports no device, or fails with an unknown error.
    """
    files: dict[str, str] = values[_FILES]
    cards = {name: why for name, why in files.items() if _CARD.fullmatch(name)}
    # A job that has some of the GPUs may not open the files of the others; but with
    # this error the driver could not start the GPU.
    needed = {n: why for n, why in files.items() if n not in cards or why == _BROKEN}
    if cards and all(cards.values()):
        needed |= cards
    bad = [f"{name} ({why})" for name, why in needed.items() if why]
    if bad:
        is_broken = _BROKEN in needed.values()
        yield Problem(f"cannot open {', '.join(bad)}", fix=gpu_lost.fix * is_broken)


@check(Family.GPU, FAIL, LOST, _FILES, COUNT)
def gpu_lost(fleet: Fleet) -> Problems:
    """Every GPU answers.

    reads: NVML's answers for each GPU, each in a process of its own, and the device
        files that can be opened
    threshold: no GPU is reported as lost or in need of a reset, has no name, or does
        not answer all questions in 15 s; no fewer GPUs than device files
    source: NVIDIA's NVML manual: errors GPU_IS_LOST and RESET_REQUIRED, and those of
        nvmlDeviceGetHandleByIndex; Xid 79, a GPU has fallen off the bus; 15 s: AMD's
        Primus
    fix: reboot the host; if it happens again, the GPU or its slot is broken
    needs: an NVIDIA GPU
    why: The rank on it fails at its first CUDA call, and the job with it.
    """
    for host in fleet.having(LOST, _FILES, COUNT):
        lost: list[str] = host.values[LOST]
        yield from fold_gpus(host.host, (Problem(w) if w else None for w in lost))
        files: dict[str, str] = host.values[_FILES]
        num_files = sum(not why for n, why in files.items() if _CARD.fullmatch(n))
        count = host.values[COUNT] or 0
        if count < num_files:
            what = f"NVML knows {count} GPUs, but {num_files} have device files"
            yield Problem(what, host=host.host)


@same_everywhere(Family.GPU, FAIL, COUNT, "number of GPUs")
def gpu_count(count: Value) -> str:
    """All hosts have the same number of GPUs.

    reads: the number of GPUs by NVML
    threshold: what most hosts have
    source: ronde's own: ranks are spread evenly over hosts
    fix: give each host its ranks with -H host:ranks, or find the missing GPU
    needs: several hosts
    why: A host gets more ranks than it has GPUs.
    """
    return spell(count)


@check(Family.GPU, WARN, "gpu.titles")
def gpu_model(fleet: Fleet) -> Problems:
    """All hosts have the same models of GPUs, with the same memory.

    reads: NVML's names of the GPUs, and the total memory of each
    threshold: the models that most hosts have; the memory in whole GiB that most GPUs
        of the model have
    source: ronde's own: each step waits for the slowest rank
    fix: train on hosts of one model; nvidia-smi -q -d MEMORY: look for MIG, ECC or
        retired memory
    needs: several hosts with GPUs
    why: The faster GPUs wait for the slower at every step, and a model that fits on
        the others runs out of memory.
    """
    titles = "gpu.titles"
    # A host without GPUs differs in their number already.
    having = tuple(facts for facts in fleet.having(titles) if facts.values[titles])
    yield from differing(
        Fleet(having, fleet.settings),
        titles,
        "GPUs are",
        lambda titles: ", ".join(sorted({title for title in titles if title})),
    )
    memory = "gpu.memory_bytes"
    yield from odd_gpus(fleet, memory, lambda m: f"{m['total'] / 2**30:.0f} GiB", WARN)
