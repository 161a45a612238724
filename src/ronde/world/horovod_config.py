"""Horovod's variables that change how a program runs: ``HOROVOD_*``."""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ronde.errors import WorldError

PREFIX = "HOROVOD_"
DYNAMIC = "DYNAMIC"
"""What ``HOROVOD_TIMELINE`` says to have timelines started by the program."""

# Those of logging, which nobody needs to load for them.
_LEVELS = {
    "TRACE": 10,
    "DEBUG": 10,
    "INFO": 20,
    "WARNING": 30,
    "ERROR": 40,
    "FATAL": 50,
}


@dataclass(frozen=True, slots=True)
class HorovodConfig:
    """What the variables say; what they leave open is Horovod's default.

    Attributes:
        fusion_threshold_bytes: Tensors are fused up to this; 0 fuses none.
        cycle_time_s: How long submissions gather before they are sent off together.
        cache_capacity: Number of responses remembered; 0 for none.
        is_group_alone: Do not fuse a group with anything else.
        is_hierarchical: Whether a hierarchical or torus reduction is asked for.
        timeline: Path of the timeline, ``DYNAMIC`` or empty.
        has_timeline_cycles: Whether the timeline marks cycles.
        stall_warning_s: Warn of what has waited for so long; 0 for never.
        stall_shutdown_s: End the job after so long; 0 for never.
        is_autotuning: Whether to tune bucket size and fusion threshold.
        autotune_log: Path of the log, or empty.
        autotune_warmup_samples: Samples thrown away at the start.
        autotune_steps_per_sample: Steps in a sample.
        autotune_max_samples: Samples after which tuning ends.
        has_dynamic_process_sets: Whether sets may come and go after ``init()``.
        is_elastic: Whether ranks may come and go.
        reset_limit: How often they may meet anew; None for no limit.
        start_timeout_s: How long ``init()`` may wait for the others; None for ronde's
            default.
        collective_timeout_s: How long a collective may wait for another rank (Horovod
            says so of Gloo); None for ronde's default.
        log_level: A level of ``logging``; None for whatever the program has set.
        thread_affinity: The core of the coordinating thread, for each local rank;
            empty leaves that to the kernel.
        explicit: The variables that are set, without their prefix: not to be tuned.
        without_effect: Those among them that change nothing, and need not.
        remarks: Sentences to warn the user with, once.
    """

    fusion_threshold_bytes: int = 128 << 20
    cycle_time_s: float = 0.001
    cache_capacity: int = 1024
    is_group_alone: bool = False
    is_hierarchical: bool = False
    timeline: str = ""
    has_timeline_cycles: bool = False
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
    is_autotuning: bool = False
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    has_dynamic_process_sets: bool = False
    is_elastic: bool = False
    reset_limit: int | None = None
    start_timeout_s: float | None = None
    collective_timeout_s: float | None = None
    log_level: int | None = None
    thread_affinity: tuple[int, ...] = ()
    explicit: frozenset[str] = frozenset()
    without_effect: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def read_horovod_config(environ: Mapping[str, str] | None = None) -> HorovodConfig:
    """Read Horovod's variables; one that is empty counts as not set.

    Booleans are true as Horovod has it, for a number above 0, and for true, yes and
    on.

    Args:
        environ: The variables; None reads this process's own.

    Raises:
        WorldError: A value is not what its variable takes.
    """
    if environ is None:
        # Reading it here is this module's purpose; everybody else is given a mapping.
        environ = os.environ  # noqa: TID251
    said = {
        name.removeprefix(PREFIX): value.strip()
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and value.strip()
    }
    values: dict[str, Any] = {
        attribute: read(name, said[name])
        for name, (attribute, read) in _HEARD.items()
        if name in said
    }
    hierarchical = [_boolean(name, said.get(name, "")) for name in _HIERARCHICAL]
    remarks = _remarks(said)
    if _boolean(_NO_STALL_CHECK, said.get(_NO_STALL_CHECK, "")):
        values |= {"stall_warning_s": 0.0, "stall_shutdown_s": 0.0}
    warning_s = values.get("stall_warning_s", HorovodConfig().stall_warning_s)
    if 0 < values.get("stall_shutdown_s", 0) < warning_s:
        values["stall_shutdown_s"] = 0.0
        remarks.append(
            f"{PREFIX}STALL_SHUTDOWN_TIME_SECONDS must be at least the warning time, "
            f"{warning_s:g}, got {said['STALL_SHUTDOWN_TIME_SECONDS']}. No stall will "
            "end the job."
        )
    return HorovodConfig(
        **values,
        is_hierarchical=any(hierarchical),
        explicit=frozenset(said),
        without_effect=tuple(filter(_has_no_effect, said)),
        remarks=tuple(remarks),
    )


def report_ignored(knobs: HorovodConfig) -> None:
    """Log, once a process, which variables have no effect.

    Args:
        knobs: From ``read_horovod_config``.
    """
    _report(knobs.without_effect, knobs.remarks)


@cache
def _report(without_effect: tuple[str, ...], remarks: tuple[str, ...]) -> None:
    import logging

    logger = logging.getLogger("ronde")
    if without_effect:
        logger.debug("These variables change nothing: %s.", _full(without_effect))
    for remark in remarks:
        logger.warning("%s", remark)


def _remarks(said: Mapping[str, str]) -> list[str]:
    unknown = [name for name in said if not _is_known(name)]
    ccl = [name for name in _ENGINES if said.get(name, "").lower() == "ccl"]
    remarks: list[str] = []
    if unknown:
        remarks.append(
            f"These variables are unknown to ronde and change nothing: "
            f"{_full(unknown)}. Check their spelling, or unset them."
        )
    if ccl:
        remarks.append(f"{_full(ccl)} must be mpi or gloo, got ccl. ronde chooses.")
    return remarks


def _full(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(PREFIX + name for name in names)


def _is_known(name: str) -> bool:
    others = (_NO_STALL_CHECK, *_ENGINES, *_HIERARCHICAL, *_PLACE)
    return name in _HEARD or name in others or _has_no_effect(name)


def _has_no_effect(name: str) -> bool:
    return name in _WITHOUT_EFFECT or _OF_THE_BUILD.match(name) is not None


def _refused(name: str, rule: str, text: str) -> WorldError:
    return WorldError(
        f"{PREFIX}{name} must be {rule}, got {text!r}. Correct it, or unset it."
    )


def _boolean(name: str, text: str) -> bool:
    word = text.lower()
    if word in ("", "false", "no", "off"):
        return False
    if word in ("true", "yes", "on"):
        return True
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


def _text(name: str, text: str) -> str:
    del name
    return text


def _timeline(name: str, text: str) -> str:
    del name
    return DYNAMIC if text.upper() == DYNAMIC else text


def _level(name: str, text: str) -> int:
    if text.upper() not in _LEVELS:
        raise _refused(name, f"one of {', '.join(_LEVELS)}", text)
    return _LEVELS[text.upper()]


def _cores(name: str, text: str) -> tuple[int, ...]:
    if re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text.replace(" ", "")) is None:
        raise _refused(name, "cores as 0,1,2, one for each local rank", text)
    return tuple(map(int, text.split(",")))


_HEARD: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "FUSION_THRESHOLD": ("fusion_threshold_bytes", _integer),
    "CYCLE_TIME": ("cycle_time_s", _milliseconds),
    "CACHE_CAPACITY": ("cache_capacity", _integer),
    "DISABLE_GROUP_FUSION": ("is_group_alone", _boolean),
    "TIMELINE": ("timeline", _timeline),
    "TIMELINE_MARK_CYCLES": ("has_timeline_cycles", _boolean),
    "STALL_CHECK_TIME_SECONDS": ("stall_warning_s", _number),
    "STALL_SHUTDOWN_TIME_SECONDS": ("stall_shutdown_s", _number),
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
_NO_STALL_CHECK = "STALL_CHECK_DISABLE"
_HIERARCHICAL = ("HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLGATHER", "TORUS_ALLREDUCE")
_ENGINES = ("CPU_OPERATIONS", "CONTROLLER")
# Read elsewhere, or written by a launcher for whoever reads it.
_PLACE = frozenset(
    (
        *("HOSTNAME", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK"),
        *("CROSS_SIZE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "GLOO_IFACE"),
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        *("BATCH_D2D_MEMCOPIES", "NUM_NCCL_STREAMS", "ENABLE_ASYNC_COMPLETION"),
        *("MPI_THREADS_DISABLE", "ADASUM_MPI_CHUNK_SIZE", "CCL_CACHE"),
        *("DISABLE_NVTX_RANGES", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "LOG_HIDE_TIME"),
        "ELASTIC_TIMEOUT",
    )
)
_OF_THE_BUILD = re.compile("(WITH|WITHOUT|GPU|NCCL|CUDA|ROCM|BUILD|MPICXX)_")
