"""What whoever answers for NVML must do; each check is given one that answers."""

import json
import re

from tests.check.nvml_fake import record

from ronde.check.gpu.nvml import GpuQuestion, HostQuestion, RefusedError
from ronde.topology.cpu_sets import parse_list

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
    HostQuestion.NUM_GPUS: is_count,
    HostQuestion.CUDA_VERSION: is_version,
    GpuQuestion.TITLE: is_text,
    GpuQuestion.BUS_ID: lambda text: re.fullmatch(
        r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text
    ),
    GpuQuestion.CAPABILITY: is_version,
    GpuQuestion.MEMORY: has(total=is_count, used=is_count),
    GpuQuestion.VBIOS: is_text,
    GpuQuestion.GSP: is_text,
    GpuQuestion.INFOROM: is_bool,
    GpuQuestion.RECOVERY: is_count,
    GpuQuestion.REMAPPED_ROWS: has(
        corrected=is_count, uncorrected=is_count, is_pending=is_bool, has_failed=is_bool
    ),
    GpuQuestion.ECC_MODE: has(now=is_bool, pending=is_bool, default=is_bool),
    GpuQuestion.ECC_ERRORS: has(
        sram_uncorrected=is_count,
        sram_uncorrected_ever=is_count,
        sram_corrected=is_count,
        dram_corrected=is_count,
    ),
    GpuQuestion.CLOCK_EVENTS: is_count,
    GpuQuestion.MARGIN: lambda margin: -100 < margin < 200,
    GpuQuestion.PCIE: has(
        width=is_count, max_width=is_count, generation=is_count, max_generation=is_count
    ),
    GpuQuestion.POWER_LIMIT: has(
        enforced=lambda watts: 1 < watts < 10_000,
        default=lambda watts: 1 < watts < 10_000,
    ),
    GpuQuestion.NVLINKS: lambda links: (
        len(links) <= WHOLE_LINKS and all(map(is_bool, links))
    ),
    GpuQuestion.FABRIC: has(
        state=is_count,
        status=is_count,
        health=is_count,
        summary=is_count,
    ),
    GpuQuestion.PEERS: lambda peers: all(map(is_count, peers)),
    GpuQuestion.PERSISTENCE: is_bool,
    GpuQuestion.MIG: is_bool,
    GpuQuestion.COMPUTE_MODE: lambda mode: mode in range(4),
    GpuQuestion.PROCESSES: lambda found: all(map(is_process, found)),
    GpuQuestion.BUSY: lambda percent: 0 <= percent <= 100,
    GpuQuestion.NEAR_CPUS: parse_list,
}


def check_forms(nvml):
    """Each answer has its question's form, or is refused with a number and words."""
    for question in HostQuestion:
        _check_form(question, lambda q=question: nvml.ask_host(q))
    for number in range(nvml.ask_host(HostQuestion.NUM_GPUS)):
        for question in GpuQuestion:
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
    for question in (GpuQuestion.BUS_ID, GpuQuestion.TITLE):
        for number in range(nvml.ask_host(HostQuestion.NUM_GPUS)):
            assert nvml.ask_gpu(question, number) == nvml.ask_gpu(question, number)


def check_told_apart(nvml):
    """No two GPUs have the same name or place."""
    numbers = range(nvml.ask_host(HostQuestion.NUM_GPUS))
    for question in (GpuQuestion.BUS_ID,):
        assert len({nvml.ask_gpu(question, n) for n in numbers}) == len(numbers)


def check_own_peer(nvml):
    """A GPU reads its own memory, and is asked about every GPU."""
    count = nvml.ask_host(HostQuestion.NUM_GPUS)
    for number in range(count):
        peers = nvml.ask_gpu(GpuQuestion.PEERS, number)
        assert len(peers) == count
        assert peers[number] == 0


def check_record(nvml):
    """All answers can be saved: they are the same after JSON."""
    answers = record(nvml)
    assert json.loads(json.dumps(answers)) == answers
    assert len(answers["gpus"]) == nvml.ask_host(HostQuestion.NUM_GPUS)


SUITE = (check_forms, check_steady, check_told_apart, check_own_peer, check_record)
