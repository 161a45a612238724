"""Query the GPUs of this host with NVML, each GPU in its own process.

If a GPU hangs or crashes the driver, only its own answers are missing. Each question
becomes a fact: a list of answers in NVML's order, with None if the question does not
apply to a GPU. If nvidia-ml-py or the driver lacks a function, its answers are
unreadable. ``each_gpu`` and ``odd_gpus`` check such lists. GPUs of one host with the
same problem are reported together.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref
from functools import partial
from typing import Any, NamedTuple

from ronde.check.check import Check, Problem, Problems, Severity, make_check
from ronde.check.fleet import Fleet, Value
from ronde.check.gpu.smi import FailedError, SmiReport, ask_smi, find_error
from ronde.check.probing import (
    ENDED,
    FactReader,
    ProbeEntry,
    UnreadableError,
    run_probes,
)
from ronde.topology.cpu_sets import format_list
from ronde.topology.kernel_files import read_text
from ronde.topology.pci import plain_address
from ronde.topology.probes.nvml import NoNvmlError, open_nvml

_DEADLINE_S = 15.0  # for all questions about one GPU; source: AMD's Primus
COUNT = "gpu.count"
LOST = "gpu.lost"  # fact: the reason for each GPU; empty for GPUs that answer
_NAME = "titles"  # the first question, which every working GPU answers
# Each answer is stored as the fact ``gpu.`` plus this name.
HOST_QUESTIONS = ("count", "cuda_version")


class RefusedError(UnreadableError):
    """Raised if NVML refuses a question; ``code`` is NVML's error number."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason}{'; root would help' * (code == NO_PERMISSION)}")
        self.code = code


INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_POWER = 2, 3, 4, 8
TIMEOUT, IRQ_ISSUE, FUNCTION_NOT_FOUND, CORRUPTED_INFOROM = 10, 11, 13, 14
GPU_IS_LOST, RESET_REQUIRED, ARGUMENT_VERSION_MISMATCH, UNKNOWN = 15, 16, 25, 999

# For any question these errors mean that the GPU is lost.
_REPORTED_LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED})
# So do these errors for the question ``titles``. ``UNKNOWN`` is often the first sign of
# a GPU that has fallen off the bus.
_GONE = _REPORTED_LOST | {INSUFFICIENT_POWER, TIMEOUT, IRQ_ISSUE, UNKNOWN}

_RECOVERY_FIELD = 230
_MAX_LINKS = 36


class NvmlDriver:
    """The NVIDIA driver of this host, queried through ``pynvml``.

    All methods raise ``RefusedError`` if NVML does not answer.
    """

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401  a module without types
        self.nvml = nvml
        self._mismatch: Any = getattr(nvml, "NVMLLibraryMismatchError", ())

    def ask_host(self, question: str) -> Value:
        if question == "count":
            return int(self.call("nvmlDeviceGetCount"))
        # 12040 is [12, 4].
        version = int(self.call("nvmlSystemGetCudaDriverVersion_v2"))
        return [version // 1000, version % 1000 // 10]

    def ask_gpu(self, question: str, number: int) -> Value:
        handle = self.call("nvmlDeviceGetHandleByIndex", number)
        return GPU_QUESTIONS[question](_AskedGpu(self, handle))

    def call(self, name: str, *given: object) -> Any:  # noqa: ANN401
        function = getattr(self.nvml, name, None)
        if function is None:
            reason = f"nvidia-ml-py is too old: it has no {name}"
            raise RefusedError(FUNCTION_NOT_FOUND, reason)
        try:
            return function(*given)
        except self.nvml.NVMLError as error:
            raise RefusedError(int(error.value), f"NVML reports: {error}") from error
        except self._mismatch as error:
            # The module raises it if the driver lacks a function.
            reason = f"the driver is too old for nvidia-ml-py's {name}"
            raise RefusedError(FUNCTION_NOT_FOUND, reason) from error


class _AskedGpu(NamedTuple):
    driver: NvmlDriver
    handle: Any

    def __call__(self, name: str, *given: object) -> Any:  # noqa: ANN401
        return self.driver.call(f"nvmlDevice{name}", self.handle, *given)


_Answer = Callable[[_AskedGpu], Value]


def _text(answer: Any) -> str:  # noqa: ANN401  str, or bytes by release of the module
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)


def _memory(ask: _AskedGpu) -> Value:
    """Return the total bytes, and the used bytes except those of the driver."""
    memory = ask("GetMemoryInfo", getattr(ask.driver.nvml, "nvmlMemory_v2", None))
    return {"total": int(memory.total), "used": int(memory.used)}


def _fabric(ask: _AskedGpu) -> Value:
    """Query the fabric with the newest struct that nvidia-ml-py and the driver know."""
    refusal = RefusedError(FUNCTION_NOT_FOUND, "nvidia-ml-py is too old")
    for form in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        make = getattr(ask.driver.nvml, form, None)
        if make is None:
            continue
        info = make()
        try:
            ask("GetGpuFabricInfoV", byref(info))
        except RefusedError as error:
            if error.code not in {ARGUMENT_VERSION_MISMATCH, INVALID_ARGUMENT}:
                raise
            refusal = error
            continue
        return {
            "state": int(info.state),
            "status": int(info.status),
            "health": int(info.healthMask),
            "summary": int(getattr(info, "healthSummary", 0)),
        }
    raise refusal


def _has_valid_inforom(ask: _AskedGpu) -> Value:
    try:
        ask("ValidateInforom")
    except RefusedError as error:
        if error.code == CORRUPTED_INFOROM:
            return False
        raise
    return True


def _recovery(ask: _AskedGpu) -> Value:
    (field,) = ask("GetFieldValues", [_RECOVERY_FIELD])
    if field.nvmlReturn:
        # A driver that does not know the field reports an invalid argument.
        code = int(field.nvmlReturn)
        code = NOT_SUPPORTED if code == INVALID_ARGUMENT else code
        raise RefusedError(code, f"NVML cannot read the field: error {code}")
    return int(field.value.uiVal)


def _remapped_rows(ask: _AskedGpu) -> Value:
    corrected, uncorrected, is_pending, has_failed = ask("GetRemappedRows")
    counts = {"corrected": int(corrected), "uncorrected": int(uncorrected)}
    return {**counts, "is_pending": bool(is_pending), "has_failed": bool(has_failed)}


# Corrected 0, uncorrected 1; since the driver was loaded 0, ever 1; DRAM 2, SRAM 7.
_ECC_ERRORS = {
    "sram_uncorrected": (1, 0, 7),
    "sram_uncorrected_ever": (1, 1, 7),
    "sram_corrected": (0, 0, 7),
    "dram_corrected": (0, 0, 2),
}
_PCIE = {
    "width": "GetCurrPcieLinkWidth",
    "max_width": "GetMaxPcieLinkWidth",
    "generation": "GetCurrPcieLinkGeneration",
    "max_generation": "GetMaxPcieLinkGeneration",
}


def _clock_events(ask: _AskedGpu) -> Value:
    """Return the reasons for reduced clocks as NVML's bit mask."""
    try:
        return int(ask("GetCurrentClocksEventReasons"))
    except RefusedError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        return int(ask("GetCurrentClocksThrottleReasons"))  # before release 535


def _nvlinks(ask: _AskedGpu) -> Value:
    found: list[bool] = []
    for link in range(_MAX_LINKS):
        try:
            found.append(bool(ask("GetNvLinkState", link)))
        except RefusedError as error:
            # Link numbers may have gaps.
            if error.code not in {NOT_SUPPORTED, INVALID_ARGUMENT}:
                raise
    return found


def _processes(ask: _AskedGpu) -> Value:
    """Return the GPU's compute processes, except those that also use its graphics."""
    computing, drawing = ask("GetComputeRunningProcesses"), set[int]()
    with suppress(RefusedError):
        if computing:
            drawing |= {int(each.pid) for each in ask("GetGraphicsRunningProcesses")}
    return [
        {"pid": int(each.pid), "memory_bytes": each.usedGpuMemory}
        for each in computing
        if int(each.pid) not in drawing
    ]


GPU_QUESTIONS: dict[str, _Answer] = {
    "titles": lambda ask: _text(ask("GetName")),
    "bus_ids": lambda ask: plain_address(_text(ask("GetPciInfo").busId)),
    "memory_bytes": _memory,
    "vbios": lambda ask: _text(ask("GetVbiosVersion")),
    "has_valid_inforom": _has_valid_inforom,
    "recovery_action": _recovery,
    "remapped_rows": _remapped_rows,
    "ecc_errors": lambda ask: {
        name: int(ask("GetMemoryErrorCounter", *which))
        for name, which in _ECC_ERRORS.items()
    },
    "clock_events": _clock_events,
    "margin_celsius": lambda ask: int(ask("GetMarginTemperature")),
    "pcie": lambda ask: {part: int(ask(name)) for part, name in _PCIE.items()},
    "nvlinks": _nvlinks,
    "fabric": _fabric,
    "mig": lambda ask: bool(ask("GetMigMode")[0]),
    "processes": _processes,
    "busy_percent": lambda ask: int(ask("GetUtilizationRates").gpu),
}
"""Questions to each GPU; the list of answers is the fact ``gpu.`` plus the name."""

ALL_ANSWERS = [f"gpu.{name}" for name in (*HOST_QUESTIONS, *GPU_QUESTIONS, "lost")]


class GpuReport(NamedTuple):
    """The answers of one GPU, and the reasons for missing answers, by question."""

    answers: Mapping[str, Value]  # None if the question does not apply
    unread: Mapping[str, str]  # the reason
    lost: str = ""  # the reason; empty if the GPU answers


def ask_gpu(nvml: NvmlDriver, number: int) -> GpuReport:
    answers: dict[str, Value] = {}
    unread: dict[str, str] = {}
    lost = ""
    for question in GPU_QUESTIONS:
        try:
            answers[question] = nvml.ask_gpu(question, number)
        except RefusedError as error:
            if error.code in (_GONE if question == _NAME else _REPORTED_LOST):
                lost = lost or str(error)
            elif error.code == NOT_SUPPORTED:
                answers[question] = None
            else:
                unread[question] = str(error)
    return GpuReport(answers, {} if lost else unread, lost)


def ask_apart(count: int, deadline_s: float) -> list[GpuReport]:
    entries = {
        str(number): ProbeEntry((__name__,), deadline_s, "", {"gpu": number})
        for number in range(count)
    }
    return [
        GpuReport({}, dict.fromkeys(GPU_QUESTIONS, failure))
        if failure.startswith(ENDED)
        else GpuReport(**values or {"answers": {}, "unread": {}, "lost": failure})
        for values, _, failure, _ in run_probes(entries, {}).values()
    ]


def read(reader: FactReader) -> None:
    """Query the GPU with the number in the setting ``gpu``."""
    with open_nvml() as nvml:
        report = ask_gpu(NvmlDriver(nvml), reader.settings["gpu"])
    reader.values |= report._asdict()


def ask_driver(reader: FactReader, deadline_s: float = _DEADLINE_S) -> None:
    """Store ``ALL_ANSWERS`` from NVML; from nvidia-smi if nvidia-ml-py is missing."""
    with reader.reading(*ALL_ANSWERS):
        try:
            with open_nvml() as nvml:
                ask = partial(ask_apart, deadline_s=deadline_s)
                store_answers(reader, NvmlDriver(nvml), ask)
        except NoNvmlError as error:
            if error.__cause__ is not None:  # it is installed, but fails
                reader.values["gpu.nvml_error"] = str(error.__cause__)
                raise UnreadableError(str(error)) from error
            try:
                store_report(reader, ask_smi())
            except FailedError as failure:
                reader.values["gpu.nvml_error"] = str(failure)
                raise UnreadableError(f"nvidia-smi: {failure}") from failure


def store_report(reader: FactReader, report: SmiReport) -> None:
    cuda_version, gpus = report
    reader.values |= {COUNT: len(gpus), "gpu.cuda_version": cuda_version}
    why = "nvidia-smi does not print it; nvidia-ml-py has it: pip install nvidia-ml-py"
    found: list[GpuReport] = []
    for gpu in gpus:
        lost = find_error(str(gpu.get(_NAME, "")))
        missing = () if lost else GPU_QUESTIONS.keys() - gpu.keys()
        found.append(GpuReport(gpu, dict.fromkeys(missing, why), lost))
    _store_gpus(reader, found)


def store_answers(
    reader: FactReader, nvml: NvmlDriver, ask_gpus: Callable[[int], Sequence[GpuReport]]
) -> None:
    """Store ``ALL_ANSWERS``; ``ask_gpus`` is called with the number of GPUs."""
    for question in HOST_QUESTIONS:
        with reader.reading(f"gpu.{question}"):
            reader.values[f"gpu.{question}"] = nvml.ask_host(question)
    _store_gpus(reader, ask_gpus(reader.values.get(COUNT, 0)))


def _store_gpus(reader: FactReader, gpus: Sequence[GpuReport]) -> None:
    reader.values[LOST] = [gpu.lost for gpu in gpus]
    for question in GPU_QUESTIONS:
        fact = f"gpu.{question}"
        reasons = {
            n: g.unread[question] for n, g in enumerate(gpus) if question in g.unread
        }
        if reasons:
            reason = next(iter(reasons.values()))
            reader.unreadable[fact] = f"of GPU {format_list(reasons)}: {reason}"
        if len(reasons) < len(gpus) or not gpus:
            reader.values[fact] = [gpu.answers.get(question) for gpu in gpus]
    for processes in reader.values.get("gpu.processes", ()):
        for process in processes or ():
            # Empty if the container does not show the process.
            process["command"] = read_text(f"/proc/{process['pid']}/comm")


def fold_gpus(host: str, problems: Iterable[Problem | None]) -> Problems:
    """Yield each distinct problem of a host's GPUs once, with the GPUs that have it.

    ``problems`` has one entry per GPU, which is None for a healthy GPU.
    """
    alike: dict[Problem, list[int]] = defaultdict(list)
    for number, problem in enumerate(problems):
        if problem is not None:
            alike[problem].append(number)
    for problem, numbers in alike.items():
        gpus = f"GPU{'s' * (len(numbers) > 1)} {format_list(numbers)}"
        fix = problem.fix.replace("-i N", f"-i {','.join(map(str, numbers))}")
        yield problem._replace(message=f"{gpus}: {problem.message}", fix=fix, host=host)


def each_gpu(
    severity: Severity, *facts: str
) -> Callable[[Callable[..., Problems]], Check]:
    """Return a decorator for a function that yields the problems of one GPU.

    The function is called with the GPU's answers. Only its first problem counts.
    """

    def make(judge: Callable[..., Problems]) -> Check:
        def judge_all(fleet: Fleet) -> Problems:
            for host in fleet.having(*facts):
                answers = zip(*(host.values[f] or () for f in facts), strict=True)
                found = (
                    None if each.count(None) == len(each) else next(judge(*each), None)
                    for each in answers
                )
                yield from fold_gpus(host.host, found)

        return make_check(judge, judge_all, severity, facts)

    return make


def odd_gpus(
    fleet: Fleet, fact: str, show: Callable[[Value], str], severity: Severity
) -> Problems:
    """Yield a problem for each GPU that differs from most GPUs of its model."""
    shown: dict[str, list[tuple[str, str]]] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for facts in fleet.having(fact, "gpu.titles"):
        pairs = zip(facts.values["gpu.titles"], facts.values[fact], strict=True)
        shown[facts.host] = [(str(t), "" if a is None else show(a)) for t, a in pairs]
        for title, value in shown[facts.host]:
            counts[title].update([value] if value else [])
    usual: dict[str, str] = {}
    for title, counter in counts.items():
        value, most = max(counter.items(), key=lambda item: item[1], default=("", 0))
        usual[title] = value if 2 * most > counter.total() else ""
    for host, gpus in shown.items():
        found = (
            Problem(value, severity, f"{usual[title]} on most GPUs of this model")
            if value and usual[title] and value != usual[title]
            else None
            for title, value in gpus
        )
        yield from fold_gpus(host, found)
