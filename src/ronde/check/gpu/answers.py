"""What NVML reports of each GPU, each asked for in a process of its own.

A driver that hangs on one GPU leaves the facts of the others. Whether GPUs reach each
other is asked for apart, for there each answer is about two. Each answer is a list in
NVML's order, with nothing for a GPU to which the question does not apply.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ronde.check.facts import Reading, UnreadableError, Value
from ronde.check.gpu.nvml import (
    GONE,
    LOST as REPORTED_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    TIMEOUT,
    GpuQuestion,
    HostQuestion,
    NvmlDriver,
    RefusedError,
)
from ronde.check.probing import ENDED, ProbeEntry, run_probes
from ronde.topology.cpu_sets import format_list
from ronde.topology.kernel_files import read_text
from ronde.topology.probes.nvml import NoNvmlError, open_nvml

DEADLINE_S = 15.0
"""What the questions about one GPU may take. Source: AMD's Primus."""

COUNT = "gpu.count"
LOST = "gpu.lost"
"""Fact: of each GPU why it is lost; empty of one that answers."""

_MODULE = "ronde.check.gpu.answers"
_BETWEEN_GPUS = GpuQuestion.PEERS
_FAILED = 0


def fact_of(question: HostQuestion | GpuQuestion) -> str:
    """Return the name of the fact that an answer becomes."""
    return f"gpu.{question.value}"


ALL_ANSWERS = [fact_of(question) for question in (*HostQuestion, *GpuQuestion)] + [LOST]


class GpuReport(NamedTuple):
    """What NVML reports of one GPU.

    Attributes:
        answers: By question.
        refused: By question that has no answer: NVML's number of the error, and why.
        hung: Why nothing is known, of a GPU that does not answer at all; else empty.
    """

    answers: dict[str, Value]
    refused: dict[str, tuple[int, str]]
    hung: str = ""


def ask_gpu(
    nvml: NvmlDriver, number: int, questions: Iterable[GpuQuestion] = tuple(GpuQuestion)
) -> GpuReport:
    """Ask for one GPU in this process."""
    found = GpuReport({}, {})
    for question in questions:
        try:
            found.answers[question] = nvml.ask_gpu(question, number)
        except RefusedError as error:
            found.refused[question] = error.code, str(error)
    return found


def ask_apart(count: int) -> list[GpuReport]:
    """Ask for this host's GPUs, for each in a process of its own."""
    own = [question for question in GpuQuestion if question != _BETWEEN_GPUS]
    parts = {str(number): ([number], own) for number in range(count)}
    parts[_BETWEEN_GPUS] = (list(range(count)), [_BETWEEN_GPUS])
    entries = {
        name: ProbeEntry((_MODULE,), DEADLINE_S, "", {"gpus": gpus, "questions": asked})
        for name, (gpus, asked) in parts.items()
    }
    outcomes = run_probes(entries, {}) if count else {}
    found: list[GpuReport] = []
    for number in range(count):
        between, alone = outcomes[_BETWEEN_GPUS], outcomes[str(number)]
        gpu = _answers_of(alone.values, alone.failure, 0, own)
        peers = _answers_of(between.values, between.failure, number, [_BETWEEN_GPUS])
        # A hanging question about its peers does not make a GPU one that hangs.
        late = {_BETWEEN_GPUS: (TIMEOUT, peers.hung)} if peers.hung else {}
        refused = {**gpu.refused, **peers.refused, **late}
        found.append(GpuReport(gpu.answers | peers.answers, refused, gpu.hung))
    return found


def _answers_of(
    values: Value, failure: str, place: int, questions: Sequence[GpuQuestion]
) -> GpuReport:
    """Return what a process found out of the GPU at a place of its list."""
    if not failure:
        answers, refused = values["gpus"][place]
        return GpuReport(answers, {n: (code, w) for n, (code, w) in refused.items()})
    if failure.startswith(ENDED):
        return GpuReport({}, dict.fromkeys(questions, (_FAILED, failure)))
    return GpuReport({}, {}, failure)


def read(reading: Reading) -> None:
    """Be one of the processes: settings name ``gpus`` and ``questions``."""
    questions = [GpuQuestion(name) for name in reading.settings["questions"]]
    with open_nvml() as nvml:
        driver = NvmlDriver(nvml)
        reading.values["gpus"] = [
            ask_gpu(driver, number, questions)[:2]
            for number in reading.settings["gpus"]
        ]


def ask_driver(reading: Reading) -> None:
    """Store all that this host's NVML answers, and ``gpu.nvml_error``."""
    with reading.reading(*ALL_ANSWERS):
        try:
            with open_nvml() as nvml:
                keep_answers(reading, NvmlDriver(nvml), ask_apart)
        except NoNvmlError as error:
            if error.__cause__ is not None:
                # It is there, and something is wrong with it.
                reading.values["gpu.nvml_error"] = str(error.__cause__)
            raise UnreadableError(str(error)) from error


def keep_answers(
    reading: Reading, nvml: NvmlDriver, ask_gpus: Callable[[int], Sequence[GpuReport]]
) -> None:
    """Store the facts ``ALL_ANSWERS``.

    Args:
        reading: Gets them.
        nvml: Is asked about the host.
        ask_gpus: Returns what is known of each of so many GPUs.
    """
    for question in HostQuestion:
        reading.keep(fact_of(question), lambda q=question: _host_answer(nvml, q))
    gpus = ask_gpus(reading.values.get(COUNT) or 0)
    lost = {number: gpu.hung for number, gpu in enumerate(gpus)}
    for question in GpuQuestion:
        _keep_gpu_answers(reading, gpus, question, lost)
    reading.values[LOST] = list(lost.values())
    processes = fact_of(GpuQuestion.PROCESSES)
    if processes in reading.values:
        named = [[_named(p) for p in each or ()] for each in reading.values[processes]]
        reading.values[processes] = named


def _named(process: Value) -> Value:
    """Return a process with ``command``, empty where a container does not see it."""
    return {**process, "command": read_text(f"/proc/{process['pid']}/comm")}


def _host_answer(nvml: NvmlDriver, question: HostQuestion) -> Value:
    try:
        return nvml.ask_host(question)
    except RefusedError as error:
        if error.code == NOT_SUPPORTED:
            return None
        raise UnreadableError(_reason(error.code, str(error))) from error


def _keep_gpu_answers(
    reading: Reading,
    gpus: Sequence[GpuReport],
    question: GpuQuestion,
    lost: dict[int, str],
) -> None:
    """Store the answers of all GPUs, and in ``lost`` why one is lost."""
    answers: list[Value] = []
    refused: dict[int, str] = {}
    # Every GPU that works has a name.
    fatal = GONE if question == GpuQuestion.TITLE else REPORTED_LOST
    for number, gpu in enumerate(gpus):
        answers.append(gpu.answers.get(question))
        code, why = gpu.refused.get(question, (NOT_SUPPORTED, ""))
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
