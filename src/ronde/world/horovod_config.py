"""Horovod's variables that change how a program runs: ``HOROVOD_*``."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ronde.errors import WorldError

PREFIX = "HOROVOD_"
DYNAMIC = "DYNAMIC"
"""The value of ``HOROVOD_TIMELINE`` with which programs start timelines."""


@dataclass(frozen=True, slots=True)
class HorovodConfig:
    """The variables' values; what they leave open is Horovod's default."""

    fusion_threshold_bytes: int = 128 << 20  # 0 fuses none
    cycle_time_s: float = 0.001  # how long submissions gather before they are sent off
    cache_capacity: int = 1024  # responses remembered; 0 for none
    is_group_alone: bool = False  # fuse a group with nothing else
    is_hierarchical: bool = False  # a hierarchical or torus reduction is asked for
    timeline: str = ""  # path, ``DYNAMIC`` or empty
    has_timeline_cycles: bool = False
    stall_warning_s: float = 60.0  # 0 for never
    stall_shutdown_s: float = 0.0  # 0 for never
    is_autotuning: bool = False  # tune bucket size and fusion threshold
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    has_dynamic_process_sets: bool = False  # sets may come and go after ``init()``
    is_elastic: bool = False  # ranks may come and go
    reset_limit: int | None = None  # how often they may connect anew; None: any number
    start_timeout_s: float | None = None  # None for ronde's default
    collective_timeout_s: float | None = None  # of Gloo's in Horovod; None as above
    log_level: int | None = None  # of ``logging``; None leaves the program's
    # The core of the coordinating thread, for each local rank.
    thread_affinity: tuple[int, ...] = ()
    explicit: frozenset[str] = frozenset()  # variables set, without prefix: not tuned
    without_effect: tuple[str, ...] = ()  # those of them that change nothing
    remarks: tuple[str, ...] = ()  # sentences to warn the user with, once


def read_horovod_config(environ: Mapping[str, str] | None = None) -> HorovodConfig:
    """Read Horovod's variables; one that is empty counts as not set.

    Booleans are true as Horovod has it, for a number above 0, and for true, yes, on.
    """
    if environ is None:
        # Reading it here is this module's purpose; everybody else is given a mapping.
        environ = os.environ  # noqa: TID251
    given = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and value.strip()
    }
    values: dict[str, Any] = {}
    for name, (attribute, read) in _READERS.items():
        if name in given:
            # Several variables ask for a hierarchical reduction; any of them will do.
            values[attribute] = values.get(attribute) or read(name, given[name])
    remarks = _remarks(given)
    if values.pop("", False):
        values |= {"stall_warning_s": 0.0, "stall_shutdown_s": 0.0}
    warning_s = values.get("stall_warning_s", HorovodConfig().stall_warning_s)
    if 0 < values.get("stall_shutdown_s", 0) < warning_s:
        values["stall_shutdown_s"] = 0.0
        remarks.append(
            f"{PREFIX}STALL_SHUTDOWN_TIME_SECONDS must be at least the warning time, "
            f"{warning_s:g}, got {given['STALL_SHUTDOWN_TIME_SECONDS']}. No stall will "
            "end the job."
        )
    return HorovodConfig(
        **values,
        explicit=frozenset(given),
        without_effect=tuple(filter(_WITHOUT_EFFECT.fullmatch, given)),
        remarks=tuple(remarks),
    )


@cache
def report_ignored(config: HorovodConfig) -> None:
    """Log, once a process, which variables have no effect."""
    import logging

    logger = logging.getLogger("ronde")
    if config.without_effect:
        unused = _full(config.without_effect)
        logger.debug("These variables change nothing: %s.", unused)
    for remark in config.remarks:
        logger.warning("%s", remark)


def _remarks(given: Mapping[str, str]) -> list[str]:
    others = (_READ_ELSEWHERE, _WITHOUT_EFFECT)
    named = [name for name in given if name not in _READERS]
    unknown = [n for n in named if not any(each.fullmatch(n) for each in others)]
    engines = ("CPU_OPERATIONS", "CONTROLLER")
    ccl = [name for name in engines if given.get(name, "").lower() == "ccl"]
    remarks: list[str] = []
    if unknown:
        remarks.append(
            f"These variables are unknown to ronde and change nothing: "
            f"{_full(unknown)}. Check their spelling, or unset them."
        )
    if ccl:
        remarks.append(f"{_full(ccl)} must be mpi or gloo, got ccl. ronde chooses.")
    return remarks


def _full(names: Sequence[str]) -> str:
    return ", ".join(PREFIX + name for name in names)


def _refused(name: str, rule: str, text: str) -> WorldError:
    return WorldError(
        f"{PREFIX}{name} must be {rule}, got {text!r}. Correct it, or unset it."
    )


def _boolean(name: str, text: str) -> bool:
    word = text.lower()
    if word in ("false", "no", "off", "true", "yes", "on"):
        return word in ("true", "yes", "on")
    if re.fullmatch(r"[+-]?[0-9]{1,18}", word) is None:
        raise _refused(name, "1 or 0", text)
    return int(word) > 0


def _integer(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise _refused(name, "an integer of at least 0", text)
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise _refused(name, "a number of at least 0", text)
    return number


def _milliseconds(name: str, text: str) -> float:
    return _number(name, text) / 1000


def _timeline(name: str, text: str) -> str:
    del name
    return DYNAMIC if text.upper() == DYNAMIC else text


def _level(name: str, text: str) -> int:
    import logging  # which nobody needs to load for the other variables

    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    if text.upper() not in levels:
        raise _refused(name, f"one of {', '.join(levels)}", text)
    return getattr(logging, text.upper(), logging.DEBUG)


def _cores(name: str, text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text.replace(" ", "")) is None:
        raise _refused(name, "cores as 0,1,2, one for each local rank", text)
    return tuple(map(int, text.split(",")))


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "FUSION_THRESHOLD": ("fusion_threshold_bytes", _integer),
    "CYCLE_TIME": ("cycle_time_s", _milliseconds),
    "CACHE_CAPACITY": ("cache_capacity", _integer),
    "DISABLE_GROUP_FUSION": ("is_group_alone", _boolean),
    "HIERARCHICAL_ALLREDUCE": ("is_hierarchical", _boolean),
    "HIERARCHICAL_ALLGATHER": ("is_hierarchical", _boolean),
    "TORUS_ALLREDUCE": ("is_hierarchical", _boolean),
    "TIMELINE": ("timeline", _timeline),
    "TIMELINE_MARK_CYCLES": ("has_timeline_cycles", _boolean),
    "STALL_CHECK_TIME_SECONDS": ("stall_warning_s", _number),
    "STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_s", _number),
    "STALL_CHECK_DISABLE": ("", _boolean),
    "AUTOTUNE": ("is_autotuning", _boolean),
    "AUTOTUNE_LOG": ("autotune_log", lambda _, path: path),
    "AUTOTUNE_WARMUP_SAMPLES": ("autotune_warmup_samples", _integer),
    "AUTOTUNE_STEPS_PER_SAMPLE": ("autotune_steps_per_sample", _integer),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("autotune_max_samples", _integer),
    "DYNAMIC_PROCESS_SETS": ("has_dynamic_process_sets", _boolean),
    "ELASTIC": ("is_elastic", _boolean),
    "RESET_LIMIT": ("reset_limit", _integer),
    "START_TIMEOUT": ("start_timeout_s", _number),
    "GLOO_TIMEOUT_SECONDS": ("collective_timeout_s", _number),
    "LOG_LEVEL": ("log_level", _level),
    "THREAD_AFFINITY": ("thread_affinity", _cores),
}
# Read elsewhere, or written by a launcher for its ranks.
_READ_ELSEWHERE = re.compile(
    "HOSTNAME|(LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_(ADDR|PORT)|GLOO_IFACE"
    "|CPU_OPERATIONS|CONTROLLER"
)
_WITHOUT_EFFECT = re.compile(
    "(WITH|WITHOUT|GPU|NCCL|CUDA|ROCM|BUILD|MPICXX)_.*"  # of the build
    "|BATCH_D2D_MEMCOPIES|NUM_NCCL_STREAMS|ENABLE_ASYNC_COMPLETION|MPI_THREADS_DISABLE"
    "|ADASUM_MPI_CHUNK_SIZE|CCL_CACHE|DISABLE_NVTX_RANGES|LOG_HIDE_TIME|ELASTIC_TIMEOUT"
    "|AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
)
