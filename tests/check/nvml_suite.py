"""What whoever answers for NVML must do; each check is given one that answers."""

import json
import re

from tests.check.nvml_fake import record

from ronde.check import GPU_QUESTIONS, HOST_QUESTIONS, RefusedError

WHOLE_LINKS = 36


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_bool(value):
    return isinstance(value, bool)


def is_text(value):
    return isinstance(value, str) and value != ""


def has(**parts):
    """Return whether a value is an object with just these parts, each of its form."""
    return lambda value: (
        value.keys() == parts.keys()
        and all(is_right(value[name]) for name, is_right in parts.items())
    )


def is_version(value):
    return len(value) == 2 and all(map(is_count, value))


def is_process(value):
    size = value["memory_bytes"]
    return value["pid"] > 0 and (size is None or is_count(size))


FORMS = {
    "count": is_count,
    "cuda_version": is_version,
    "titles": is_text,
    "bus_ids": lambda text: re.fullmatch(
        r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text
    ),
    "memory_bytes": has(total=is_count, used=is_count),
    "vbios": is_text,
    "has_valid_inforom": is_bool,
    "recovery_action": is_count,
    "remapped_rows": has(
        corrected=is_count, uncorrected=is_count, is_pending=is_bool, has_failed=is_bool
    ),
    "ecc_errors": has(
        sram_uncorrected=is_count,
        sram_uncorrected_ever=is_count,
        sram_corrected=is_count,
        dram_corrected=is_count,
    ),
    "clock_events": is_count,
    "margin_celsius": lambda margin: -100 < margin < 200,
    "pcie": has(
        width=is_count, max_width=is_count, generation=is_count, max_generation=is_count
    ),
    "nvlinks": lambda links: len(links) <= WHOLE_LINKS and all(map(is_bool, links)),
    "fabric": has(state=is_count, status=is_count, health=is_count, summary=is_count),
    "mig": is_bool,
    "processes": lambda found: all(map(is_process, found)),
    "busy_percent": lambda percent: 0 <= percent <= 100,
}


def check_forms(nvml):
    """Each answer has its question's form, or is refused with a number and words."""
    for question in HOST_QUESTIONS:
        _check_form(question, lambda q=question: nvml.ask_host(q))
    for number in range(nvml.ask_host("count")):
        for question in GPU_QUESTIONS:
            _check_form(question, lambda q=question, n=number: nvml.ask_gpu(q, n))


def _check_form(question, ask):
    refused = None
    try:
        answer = ask()
    except RefusedError as error:
        refused = error
    if refused is None:
        assert FORMS[question](answer), (question, answer)
    else:
        assert refused.code > 0
        assert str(refused)


def check_steady(nvml):
    """What does not change is the same when it is asked again."""
    for question in ("bus_ids", "titles"):
        for number in range(nvml.ask_host("count")):
            assert nvml.ask_gpu(question, number) == nvml.ask_gpu(question, number)


def check_distinguished(nvml):
    """No two GPUs have the same name or place."""
    numbers = range(nvml.ask_host("count"))
    for question in ("bus_ids",):
        assert len({nvml.ask_gpu(question, n) for n in numbers}) == len(numbers)


def check_record(nvml):
    """All answers can be saved: they are the same after JSON."""
    answers = record(nvml)
    assert json.loads(json.dumps(answers)) == answers
    assert len(answers["gpus"]) == nvml.ask_host("count")


SUITE = (check_forms, check_steady, check_distinguished, check_record)
