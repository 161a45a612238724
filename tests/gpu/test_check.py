"""NVML of this machine must answer like the fake, and a healthy GPU raises no alarm."""

import json

import pytest
from tests.check.nvml_fake import SavedNvml
from tests.check.nvml_suite import SUITE

from ronde.check.facts import Reading
from ronde.check.nvml.driver import NvmlDriver
from ronde.check.nvml.record import record
from ronde.check.probes.gpu import ALL_ANSWERS, keep_answers
from ronde.check.probing import ProbeEntry, run_probes
from ronde.topology.probes.nvml import NoNvmlError, open_nvml

PROBE = {"gpu": ProbeEntry("ronde.check.probes.gpu", 60.0, "gpu.")}


@pytest.fixture
def nvml():
    try:
        with open_nvml() as module:
            yield NvmlDriver(module)
    except NoNvmlError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")


pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", SUITE)
def test_the_driver_answers_as_nvml_must(nvml, check):
    check(nvml)


def test_the_record_of_the_driver_answers_the_same(nvml, tmp_path):
    """The record is kept with the test's files: it can be a fixture of the fake's."""
    saved = tmp_path / "nvml.json"
    saved.write_text(json.dumps(record(nvml), indent=1))
    again = SavedNvml(json.loads(saved.read_text()))
    for check in SUITE:
        check(again)


def test_every_fact_is_told_or_unreadable_with_its_reason(nvml):
    reading = Reading({})
    keep_answers(reading, nvml)
    assert reading.values.keys() | reading.unreadable.keys() == set(ALL_ANSWERS)


def test_the_probe_tells_of_the_gpus_in_time(nvml):
    outcome = run_probes(PROBE, {})["gpu"]
    assert outcome.failure == ""
    assert outcome.values["gpu.count"] == len(outcome.values["gpu.uuids"]) > 0
