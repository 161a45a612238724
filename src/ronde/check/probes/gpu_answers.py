"""What NVML answers of each GPU, each asked for in a process of its own.

A driver that hangs on one GPU leaves the facts of the others. Whether GPUs reach each
other is asked for apart, for there each answer is about two.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde.check.facts import Reading, Value
from ronde.check.nvml.driver import NvmlDriver
from ronde.check.nvml.questions import TIMEOUT, GpuQuestion, Nvml, RefusedError
from ronde.check.probing import ENDED, ProbeEntry, run_probes
from ronde.topology.probes.nvml import open_nvml

DEADLINE_S = 15.0
"""What the questions about one GPU may take. Source: AMD's Primus."""

_MODULE = "ronde.check.probes.gpu_answers"
_BETWEEN_GPUS = GpuQuestion.PEERS
_FAILED = 0


class Told(NamedTuple):
    """What NVML says of one GPU.

    Attributes:
        answers: By question.
        refused: By question that has no answer: NVML's number of the error, and why.
        hung: Why nothing is known, of a GPU that does not answer at all; else empty.
    """

    answers: dict[str, Value]
    refused: dict[str, tuple[int, str]]
    hung: str = ""


def ask_gpu(
    nvml: Nvml, number: int, questions: Iterable[GpuQuestion] = tuple(GpuQuestion)
) -> Told:
    """Ask for one GPU in this process."""
    told = Told({}, {})
    for question in questions:
        try:
            told.answers[question] = nvml.ask_gpu(question, number)
        except RefusedError as error:
            told.refused[question] = error.code, str(error)
    return told


def ask_apart(count: int) -> list[Told]:
    """Ask for this host's GPUs, for each in a process of its own.

    Args:
        count: How many there are.
    """
    own = [question for question in GpuQuestion if question != _BETWEEN_GPUS]
    parts = {str(number): ([number], own) for number in range(count)}
    parts[_BETWEEN_GPUS] = (list(range(count)), [_BETWEEN_GPUS])
    entries = {
        name: ProbeEntry(
            _MODULE, DEADLINE_S, "", {"gpus": gpus, "questions": questions}
        )
        for name, (gpus, questions) in parts.items()
    }
    outcomes = run_probes(entries, {}) if count else {}
    found: list[Told] = []
    for number in range(count):
        between, alone = outcomes[_BETWEEN_GPUS], outcomes[str(number)]
        told = _told_of(alone.values, alone.failure, 0, own)
        peers = _told_of(between.values, between.failure, number, [_BETWEEN_GPUS])
        # That nobody hears of its peers does not make a GPU one that hangs.
        refused = {_BETWEEN_GPUS: (TIMEOUT, peers.hung)} if peers.hung else {}
        found.append(
            Told(
                told.answers | peers.answers,
                {**told.refused, **peers.refused, **refused},
                told.hung,
            )
        )
    return found


def _told_of(
    values: Value, failure: str, place: int, questions: Sequence[GpuQuestion]
) -> Told:
    """Return what a process found out of the GPU at a place of its list."""
    if not failure:
        answers, refused = values["told"][place]
        return Told(
            answers, {name: (code, why) for name, (code, why) in refused.items()}
        )
    if failure.startswith(ENDED):
        return Told({}, dict.fromkeys(questions, (_FAILED, failure)))
    return Told({}, {}, failure)


def read(reading: Reading) -> None:
    """Be one of the processes: settings name ``gpus`` and ``questions``."""
    questions = [GpuQuestion(name) for name in reading.settings["questions"]]
    with open_nvml() as nvml:
        driver = NvmlDriver(nvml)
        reading.values["told"] = [
            ask_gpu(driver, number, questions)[:2]
            for number in reading.settings["gpus"]
        ]
