"""GPUs of NVIDIA's: what NVML says of them, and what the kernel shows.

What each GPU answers to a question is a list in NVML's order, with nothing for a GPU to
which the question does not apply. A host without a driver for them has ``gpu.count`` 0
and none of these.
"""

from collections.abc import Callable, Sequence

from ronde.check.facts import Reading, UnreadableError, Value
from ronde.check.nvml.driver import NvmlDriver
from ronde.check.nvml.questions import (
    GONE,
    LOST as SAID_TO_BE_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    GpuQuestion,
    HostQuestion,
    Nvml,
    RefusedError,
)
from ronde.check.probes.gpu_answers import Told, ask_apart
from ronde.check.probes.gpu_log import read_xids
from ronde.check.probes.gpu_paths import (
    read_acs,
    read_direct_rdma,
    read_near_adapters,
)
from ronde.check.probes.gpu_presence import opened_files, read_cards, read_module
from ronde.check.probes.host_virtual import read_is_virtual
from ronde.topology.cpu_sets import format_list
from ronde.topology.kernel_files import list_names, read_text
from ronde.topology.probes.nvml import NoNvmlError, open_nvml

COUNT = "gpu.count"
LOST = "gpu.lost"
"""Of each GPU: why nothing more can be had of it; empty of one that answers."""


def fact_of(question: HostQuestion | GpuQuestion) -> str:
    """Return the name of the fact that an answer becomes."""
    return f"gpu.{question.value}"


ALL_ANSWERS = [fact_of(question) for question in (*HostQuestion, *GpuQuestion)] + [LOST]


def read(reading: Reading) -> None:
    """Collect all facts ``gpu.*``."""
    root = str(reading.settings.get("root", "/")).rstrip("/")
    cards = read_cards(root)
    module = read_module(root)
    with opened_files(root) as files:
        reading.values |= {
            "gpu.cards": cards,
            "gpu.kernel_module": module,
            "gpu.files": files,
            "gpu.nvml_error": "",
        }
        if not (module or files):
            # What cards there are then stands idle, and one finding says so.
            reading.values[COUNT] = 0
            return
        if not root:
            ask_driver(reading)
    reading.keep("gpu.is_virtual", lambda: read_is_virtual(root))
    reading.keep("gpu.xids", lambda: read_xids(root))
    reading.keep("gpu.direct_rdma", lambda: read_direct_rdma(root, module))
    addresses = [each["address"] for each in cards]
    reading.keep("gpu.acs", lambda: read_acs(root, addresses))
    reading.keep("gpu.near_adapters", lambda: read_near_adapters(root, addresses))
    reading.keep("gpu.own_cpus", lambda: _own_cpus(root))
    reading.values["gpu.imex_channels"] = len(
        list_names(f"{root}/dev/nvidia-caps-imex-channels")
    )


def keep_answers(
    reading: Reading, nvml: Nvml, ask_gpus: Callable[[int], Sequence[Told]]
) -> None:
    """Take down all that NVML answers.

    Args:
        reading: Gets the facts ``ALL_ANSWERS``.
        nvml: Is asked about the host.
        ask_gpus: Returns what is said of each of so many GPUs.
    """
    for question in HostQuestion:
        reading.keep(fact_of(question), lambda q=question: _host_answer(nvml, q))
    gpus = ask_gpus(reading.values.get(COUNT) or 0)
    lost = {number: told.hung for number, told in enumerate(gpus)}
    for question in GpuQuestion:
        _keep_gpu_answers(reading, gpus, question, lost)
    reading.values[LOST] = list(lost.values())
    processes = fact_of(GpuQuestion.PROCESSES)
    if processes in reading.values:
        named = [_named(each or []) for each in reading.values[processes]]
        reading.values[processes] = named


def ask_driver(reading: Reading) -> None:
    """Take down all that this host's NVML answers.

    Args:
        reading: Gets the facts ``ALL_ANSWERS``, unreadable if it does not answer, and
            ``gpu.nvml_error``, if it says why.
    """
    with reading.reading(*ALL_ANSWERS):
        try:
            with open_nvml() as nvml:
                keep_answers(reading, NvmlDriver(nvml), ask_apart)
        except NoNvmlError as error:
            if error.__cause__ is not None:
                # It is there, and something is wrong with it.
                reading.values["gpu.nvml_error"] = str(error.__cause__)
            raise UnreadableError(str(error)) from error


def _host_answer(nvml: Nvml, question: HostQuestion) -> Value:
    try:
        return nvml.ask_host(question)
    except RefusedError as error:
        if error.code == NOT_SUPPORTED:
            return None
        raise UnreadableError(_reason(error.code, str(error))) from error


def _keep_gpu_answers(
    reading: Reading,
    gpus: Sequence[Told],
    question: GpuQuestion,
    lost: dict[int, str],
) -> None:
    """Take down the answers of all GPUs; some may answer where others do not.

    Args:
        reading: Gets them.
        gpus: What is said of each.
        question: What.
        lost: By number, the GPUs; gets the reason for one that is gone.
    """
    answers: list[Value] = []
    refused: dict[int, str] = {}
    # Every GPU that works has a name.
    fatal = GONE if question == GpuQuestion.TITLE else SAID_TO_BE_LOST
    for number, told in enumerate(gpus):
        answers.append(told.answers.get(question))
        code, why = told.refused.get(question, (NOT_SUPPORTED, ""))
        if code in fatal:
            lost[number] = lost[number] or why
        elif code != NOT_SUPPORTED and not lost[number]:
            refused[number] = _reason(code, why)
    if refused:
        reason = next(iter(refused.values()))
        which = format_list(refused)
        reading.unreadable[fact_of(question)] = f"of GPU {which}: {reason}"
    if len(refused) < len(lost) or not lost:
        reading.values[fact_of(question)] = answers


def _reason(code: int, why: str) -> str:
    return f"{why}{'; root would help' * (code == NO_PERMISSION)}"


def _named(processes: list[Value]) -> list[Value]:
    """Return processes with ``command``, empty where a container does not see them."""
    return [
        each | {"command": read_text(f"/proc/{each['pid']}/comm")} for each in processes
    ]


def _own_cpus(root: str) -> str:
    """Return the CPUs that a program may use, as the kernel lists them."""
    lines = read_text(f"{root}/proc/self/status").splitlines()
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return fields["Cpus_allowed_list"].strip()
