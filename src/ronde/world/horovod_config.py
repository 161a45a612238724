"""Horovod's variables that configure a run: ``HOROVOD_*``."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ronde.errors import WorldError
from ronde.world.environment import own_or

PREFIX = "HOROVOD_"
DYNAMIC = "DYNAMIC"
"""The value of ``HOROVOD_TIMELINE`` that lets programs start timelines."""


@dataclass(frozen=True, slots=True)
class HorovodConfig:
    """The values of Horovod's variables, with Horovod's defaults."""

    fusion_threshold_bytes: int = 128 << 20  # 0 for no fusion
    cycle_time_s: float = 0.001  # time for which submissions are collected
    cache_capacity: int = 1024  # of the response cache; 0 for none
    is_group_alone: bool = False  # fuse a group with no other tensors
    is_hierarchical: bool = False  # use the engine ``hierarchical``
    timeline: str = ""  # path, ``DYNAMIC`` or empty
    has_timeline_cycles: bool = False
    stall_warning_s: float = 60.0  # 0 for never
    stall_shutdown_s: float = 0.0  # 0 for never
    is_autotuning: bool = False  # tune bucket size and fusion threshold
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    has_dynamic_process_sets: bool = False  # sets may change after ``init()``
    is_elastic: bool = False
    reset_limit: int | None = None  # number of reconnections; None for no limit
    start_timeout_s: float | None = None  # None for ronde's default
    collective_timeout_s: float | None = None  # Gloo's in Horovod; None as above
    log_level: int | None = None  # of ``logging``; None for the program's own
    # The core of the coordinating thread, for each local rank.
    thread_affinity: tuple[int, ...] = ()
    explicit: frozenset[str] = frozenset()  # variables set, without prefix: not tuned
    without_effect: tuple[str, ...] = ()  # those of them that have no effect
    remarks: tuple[str, ...] = ()  # warnings, to show once


def read_horovod_config(environ: Mapping[str, str] | None = None) -> HorovodConfig:
    """Read Horovod's variables; an empty one counts as not set.

    Booleans are true for a number above 0, as in Horovod, and for true, yes and on.
    """
    given = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(own_or(environ).items())
        if name.startswith(PREFIX) and value.strip()
    }
    values: dict[str, Any] = {}
    for name, (attribute, read) in _READERS.items():
        if name in given:
            # One of several variables is enough for hierarchical reductions.
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
        without_effect=tuple(n for n in given if re.fullmatch(_WITHOUT_EFFECT, n)),
        remarks=tuple(remarks),
    )


@cache
def report_ignored(config: HorovodConfig) -> None:
    """Log the variables that have no effect, once in a process."""
    import logging

    logger = logging.getLogger("ronde")
    if config.without_effect:
        unused = _full(config.without_effect)
        logger.debug("These variables have no effect: %s.", unused)
    for remark in config.remarks:
        logger.warning("%s", remark)


def _remarks(given: Mapping[str, str]) -> list[str]:
    others = f"{_READ_ELSEWHERE}|{_WITHOUT_EFFECT}"
    named = [name for name in given if name not in _READERS]
    unknown = [name for name in named if not re.fullmatch(others, name)]
    engines = ("CPU_OPERATIONS", "CONTROLLER")
    ccl = [name for name in engines if given.get(name, "").lower() == "ccl"]
    remarks: list[str] = []
    if unknown:
        remarks.append(
            f"These variables are unknown to ronde and have no effect: "
            f"{_full(unknown)}. Check their spelling, or unset them."
        )
    if ccl:
        remarks.append(f"{_full(ccl)} must be mpi or gloo, got ccl. ronde chooses.")
    return remarks


def _full(names: Sequence[str]) -> str:
    return ", ".join(PREFIX + name for name in names)


_Reader = Callable[[str, str], Any]  # name and text of a variable -> its value


def _reader(rule: str, pattern: str, convert: Callable[[str], Any]) -> _Reader:
    def read(name: str, text: str) -> object:
        if re.fullmatch(pattern, text, re.IGNORECASE | re.DOTALL) is None:
            cure = "Correct it, or unset it."
            raise WorldError(f"{PREFIX}{name} must be {rule}, got {text!r}. {cure}")
        return convert(text)

    return read


def _as_level(text: str) -> int:
    import logging  # not needed for the other variables

    return getattr(logging, text.upper(), logging.DEBUG)


def _as_boolean(text: str) -> bool:
    return re.fullmatch("true|yes|on|[+]?0*[1-9].*", text, re.IGNORECASE) is not None


_LEVELS = "TRACE, DEBUG, INFO, WARNING, ERROR, FATAL"
_REAL = r"\+?([0-9]{1,99}(\.[0-9]*)?|\.[0-9]{1,99})(e[+-]?[0-9]{1,2})?"
_number = _reader("a number of at least 0", _REAL, float)
_milliseconds = _reader("a number of at least 0", _REAL, lambda t: float(t) / 1000)
_integer = _reader("an integer of at least 0", "[0-9]{1,18}", int)
_WORDS = "true|yes|on|false|no|off"
_boolean = _reader("1 or 0", f"{_WORDS}|[+-]?[0-9]{{1,18}}", _as_boolean)
_text = _reader("", ".*", str)
_timeline = _reader("", ".*", lambda t: DYNAMIC if t.upper() == DYNAMIC else t)
_level = _reader(f"one of {_LEVELS}", _LEVELS.replace(", ", "|"), _as_level)
_cores = _reader(
    "cores as 0,1,2, one for each local rank",
    "[0-9]{1,6}( *, *[0-9]{1,6})*",
    lambda t: tuple(map(int, t.split(","))),
)
_READERS: dict[str, tuple[str, _Reader]] = {
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
    "AUTOTUNE_LOG": ("autotune_log", _text),
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
# Read by other modules, or written by a launcher for its ranks.
_READ_ELSEWHERE = (
    "HOSTNAME|(LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_(ADDR|PORT)|GLOO_IFACE"
    "|CPU_OPERATIONS|CONTROLLER|ELASTIC_TIMEOUT"
)
_WITHOUT_EFFECT = (
    "(WITH|WITHOUT|GPU|NCCL|CUDA|ROCM|BUILD|MPICXX)_.*"  # of the build
    "|BATCH_D2D_MEMCOPIES|NUM_NCCL_STREAMS|ENABLE_ASYNC_COMPLETION|MPI_THREADS_DISABLE"
    "|ADASUM_MPI_CHUNK_SIZE|CCL_CACHE|DISABLE_NVTX_RANGES|LOG_HIDE_TIME"
    "|AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
)
