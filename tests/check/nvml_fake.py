"""NVML's answers from a record: ``host`` by question, ``gpus`` a list of the same."""

import copy

from ronde.check import GPU_QUESTIONS, HOST_QUESTIONS, RefusedError, ask_gpu

GIB = 1 << 30

HOST = {"count": 0, "cuda_version": [12, 4]}

H100 = {
    "titles": "NVIDIA H100 80GB HBM3",
    "bus_ids": "0000:1b:00.0",
    "memory_bytes": {"total": 80 * GIB, "used": 0},
    "vbios": "96.00.74.00.01",
    "has_valid_inforom": True,
    "recovery_action": 0,
    "remapped_rows": {
        "corrected": 0,
        "uncorrected": 0,
        "is_pending": False,
        "has_failed": False,
    },
    "ecc_errors": {
        "sram_uncorrected": 0,
        "sram_uncorrected_ever": 0,
        "sram_corrected": 0,
        "dram_corrected": 0,
    },
    "clock_events": 1,
    "margin_celsius": 50,
    "pcie": {"width": 16, "max_width": 16, "generation": 1, "max_generation": 5},
    "nvlinks": [True] * 18,
    "fabric": {"state": 3, "status": 0, "health": 0, "summary": 1},
    "mig": False,
    "processes": [],
    "busy_percent": 0,
}
"""A GPU with nothing wrong, idle."""


def refusal(code, reason="NVML says no"):
    """Return a refused answer, as a record has it."""
    return {"error": code, "reason": reason}


def healthy(num_gpus=8, **changes):
    """Return the record of a healthy host; ``changes`` are answers of its last GPU."""
    gpus = [copy.deepcopy(H100) for _ in range(num_gpus)]
    for number, gpu in enumerate(gpus):
        gpu["bus_ids"] = f"0000:{0x1B + number:02x}:00.0"
    if gpus:
        gpus[-1] |= changes
    return {"host": HOST | {"count": num_gpus}, "gpus": gpus}


def asking(nvml):
    """Return a function that queries all GPUs of ``nvml`` in this process."""
    return lambda count: [ask_gpu(nvml, number) for number in range(count)]


class SavedNvml:
    """Answers as a record has it."""

    def __init__(self, record):
        self._record = record

    def ask_host(self, question):
        return self._answer(self._record["host"], question)

    def ask_gpu(self, question, number):
        return self._answer(self._record["gpus"][number], question)

    def _answer(self, answers, question):
        answer = answers[question]
        if isinstance(answer, dict) and "error" in answer:
            raise RefusedError(answer["error"], answer["reason"])
        return answer


def record(nvml):
    """Query everything, and return the answers; refusals are those of ``refusal``."""
    host = {q: _answer_of(lambda q=q: nvml.ask_host(q)) for q in HOST_QUESTIONS}
    count = host["count"]
    numbers = range(count if isinstance(count, int) else 0)
    gpus = [
        {q: _answer_of(lambda q=q, n=n: nvml.ask_gpu(q, n)) for q in GPU_QUESTIONS}
        for n in numbers
    ]
    return {"host": host, "gpus": gpus}


def _answer_of(ask):
    try:
        return ask()
    except RefusedError as error:
        return refusal(error.code, str(error))
