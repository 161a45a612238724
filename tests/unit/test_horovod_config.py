import logging
from dataclasses import fields

import pytest
from hypothesis import given, strategies as st

from ronde.errors import WorldError
from ronde.world import (
    HorovodConfig,
    read_cpu_engine,
    read_engine,
    read_horovod_config,
    report_ignored,
)

# Values and what comes of them: attribute, value.
HEARD = {
    "FUSION_THRESHOLD": ("0", "fusion_threshold_bytes", 0),
    "CYCLE_TIME": ("2.5", "cycle_time_s", 0.0025),
    "CACHE_CAPACITY": ("0", "cache_capacity", 0),
    "DISABLE_GROUP_FUSION": ("1", "is_group_alone", True),
    "HIERARCHICAL_ALLREDUCE": ("1", "is_hierarchical", True),
    "HIERARCHICAL_ALLGATHER": ("1", "is_hierarchical", True),
    "TORUS_ALLREDUCE": ("1", "is_hierarchical", True),
    "TIMELINE": ("dynamic", "timeline", "DYNAMIC"),
    "TIMELINE_MARK_CYCLES": ("1", "has_timeline_cycles", True),
    "STALL_CHECK_DISABLE": ("1", "stall_warning_s", 0.0),
    "STALL_CHECK_TIME_SECONDS": ("5", "stall_warning_s", 5.0),
    "STALL_SHUTDOWN_TIME_SECONDS": ("90", "stall_shutdown_s", 90.0),
    "AUTOTUNE": ("1", "is_autotuning", True),
    "AUTOTUNE_LOG": ("logs/a b.csv", "autotune_log", "logs/a b.csv"),
    "AUTOTUNE_WARMUP_SAMPLES": ("1", "autotune_warmup_samples", 1),
    "AUTOTUNE_STEPS_PER_SAMPLE": ("2", "autotune_steps_per_sample", 2),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("7", "autotune_max_samples", 7),
    "DYNAMIC_PROCESS_SETS": ("1", "has_dynamic_process_sets", True),
    "ELASTIC": ("1", "is_elastic", True),
    "RESET_LIMIT": ("0", "reset_limit", 0),
    "START_TIMEOUT": ("3", "start_timeout_s", 3.0),
    "GLOO_TIMEOUT_SECONDS": ("3", "collective_timeout_s", 3.0),
    "LOG_LEVEL": ("trace", "log_level", logging.DEBUG),
    "THREAD_AFFINITY": ("0,2, 4", "thread_affinity", (0, 2, 4)),
}


def horovod(**variables: str) -> dict[str, str]:
    return {f"HOROVOD_{name}": value for name, value in variables.items()}


def test_nothing_set_is_the_default() -> None:
    assert read_horovod_config({"PATH": "/bin"}) == HorovodConfig()


@pytest.mark.parametrize("name", HEARD)
def test_each_variable_is_heard(name: str) -> None:
    text, attribute, value = HEARD[name]
    knobs = read_horovod_config(horovod(**{name: text}))
    assert getattr(knobs, attribute) == value
    assert knobs.explicit == {name}
    assert not knobs.remarks
    assert not knobs.without_effect


def test_every_attribute_has_its_variable() -> None:
    about_them = {"explicit", "without_effect", "remarks"}
    heard = {attribute for _, attribute, _ in HEARD.values()}
    assert heard | about_them == {field.name for field in fields(HorovodConfig)}


@pytest.mark.parametrize("name", HEARD)
def test_empty_is_not_set(name: str) -> None:
    assert read_horovod_config(horovod(**{name: " "})) == HorovodConfig()


def test_switches() -> None:
    for is_on, texts in ((True, "1 2 true Yes on"), (False, "0 -1 false No off")):
        for text in texts.split():
            assert read_horovod_config(horovod(AUTOTUNE=text)).is_autotuning is is_on


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FUSION_THRESHOLD", "64MB"),
        ("CYCLE_TIME", "nan"),
        ("CACHE_CAPACITY", "1.5"),
        ("AUTOTUNE", "maybe"),
        ("STALL_CHECK_DISABLE", "x"),
        ("LOG_LEVEL", "loud"),
        ("THREAD_AFFINITY", "0,a"),
    ],
)
def test_bad_values_name_variable_and_value(name: str, text: str) -> None:
    with pytest.raises(WorldError, match=rf"HOROVOD_{name} must be .*, got '{text}'"):
        read_horovod_config(horovod(**{name: text}))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8))
def test_any_text_is_read_or_refused(text: str) -> None:
    for name in HEARD:
        try:
            read_horovod_config(horovod(**{name: text}))
        except WorldError as error:
            assert f"HOROVOD_{name}" in str(error)  # noqa: PT017


def test_a_shutdown_before_the_warning_is_none_and_said() -> None:
    knobs = read_horovod_config(horovod(STALL_SHUTDOWN_TIME_SECONDS="5"))
    assert knobs.stall_shutdown_s == 0
    assert "must be at least the warning time, 60, got 5." in knobs.remarks[0]


def test_what_does_nothing_is_sorted_by_how_bad_that_is() -> None:
    knobs = read_horovod_config(
        horovod(
            NUM_NCCL_STREAMS="2",
            WITH_PYTORCH="1",
            NCCL_HOME="/x",
            FUSSION_THRESHOLD="1",
            ENABLE_XLA_OPS="1",
            CPU_OPERATIONS="CCL",
            RANK="0",
        )
    )
    assert knobs.without_effect == ("NCCL_HOME", "NUM_NCCL_STREAMS", "WITH_PYTORCH")
    unknown, ccl = knobs.remarks
    assert "no effect: HOROVOD_ENABLE_XLA_OPS, HOROVOD_FUSSION_THRESHOLD." in unknown
    assert "HOROVOD_CPU_OPERATIONS must be mpi or gloo, got ccl." in ccl


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    knobs = read_horovod_config(horovod(NO_SUCH_KNOB="1", CCL_CACHE="1"))
    with caplog.at_level(logging.DEBUG, "ronde"):
        report_ignored(knobs)
        report_ignored(read_horovod_config(horovod(NO_SUCH_KNOB="1", CCL_CACHE="1")))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG, logging.WARNING]
    assert "HOROVOD_CCL_CACHE" in caplog.messages[0]
    assert "HOROVOD_NO_SUCH_KNOB" in caplog.messages[1]


@pytest.mark.parametrize(
    ("variables", "engine"),
    [
        ({}, ""),
        ({"CPU_OPERATIONS": "gloo"}, "gloo"),
        ({"CPU_OPERATIONS": "MPI"}, "mpi"),
        ({"CPU_OPERATIONS": "CCL"}, ""),
        ({"CONTROLLER": "mpi"}, "mpi"),
        ({"CONTROLLER": "gloo"}, ""),
        ({"CONTROLLER": "mpi", "CPU_OPERATIONS": "gloo"}, "gloo"),
        ({"CPU_OPERATIONS": "gloo", "GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}, ""),
    ],
)
def test_the_engine_that_horovod_is_asked_for(
    variables: dict[str, str], engine: str
) -> None:
    environ = horovod(**variables)
    assert read_cpu_engine(environ) == engine
    assert read_engine(environ) == (engine or "auto")
    assert read_engine(environ | {"RONDE_ENGINE": "scheduled"}) == "scheduled"


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(WorldError, match="HOROVOD_CONTROLLER must be mpi or gloo"):
        read_cpu_engine(horovod(CONTROLLER="tcp"))
