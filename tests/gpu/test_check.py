"""NVML of this machine must answer like the fake, and a healthy GPU raises no alarm."""

import json
from contextlib import ExitStack

import pytest
from tests.check.copies_suite import check_copies
from tests.check.nvml_fake import SavedNvml, asking, record
from tests.check.nvml_suite import SUITE
from tests.cli.conftest import Ronde

from ronde.check import (
    ALL_ANSWERS,
    FactReader,
    Family,
    NodeContext,
    NvmlDriver,
    ProbeEntry,
    address_of,
    all_checks,
    burn_host,
    measure_gpu,
    run_probes,
    store_answers,
)
from ronde.topology import NoNvmlError, open_nvml

torch = pytest.importorskip("torch")

PROBE = {"gpu": ProbeEntry(("ronde.check.gpu.presence",), 60.0, "gpu.")}


@pytest.fixture
def nvml():
    try:
        with open_nvml() as module:
            yield NvmlDriver(module)
    except NoNvmlError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")


@pytest.fixture
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    return range(torch.cuda.device_count())


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
    reading = FactReader({})
    store_answers(reading, nvml, asking(nvml))
    assert reading.values.keys() | reading.unreadable.keys() == set(ALL_ANSWERS)


def test_the_probe_tells_of_the_gpus_in_time(nvml):
    outcome = run_probes(PROBE, {})["gpu"]
    assert outcome.failure == ""
    assert outcome.values["gpu.count"] == len(outcome.values["gpu.titles"]) > 0


def test_no_check_of_a_gpu_that_works_fails(nvml):
    ended = Ronde()("check", "--json")
    assert ended.returncode in (0, 2), ended.stderr.decode()
    told = json.loads(ended.stdout)
    assert told["hosts"][0]["values"]["gpu.count"] > 0
    failed = {each["check"] for each in told["findings"] if each["severity"] == "fail"}
    names = {check.id for check in all_checks() if check.family is Family.GPU}
    assert not failed & names, told["findings"]


def test_each_gpu_of_torch_is_one_of_nvml_with_the_same_name(nvml, gpus):
    addresses = [address_of(torch.cuda.get_device_properties(n)) for n in gpus]
    known = [nvml.ask_gpu("bus_ids", n) for n in range(nvml.ask_host("count"))]
    assert len(set(addresses)) == len(gpus) <= len(known)
    for number, gpu in zip(map(known.index, addresses), gpus, strict=True):
        # Of a part of a GPU, torch tells which.
        title = nvml.ask_gpu("titles", number)
        assert torch.cuda.get_device_name(gpu).startswith(title)


def test_every_gpu_copies_and_gives_its_memory_back(nvml, gpus):
    for gpu in gpus:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(gpu)
        check_copies(measure_gpu(torch, gpu))
        assert torch.cuda.memory_reserved(gpu) == before


def test_burning_tells_of_all_gpus_what_they_computed_and_copied(nvml, gpus):
    with ExitStack() as closing:
        question = {"do": "burn_host", "seconds": 2.0, "size": 2048, "seed": 2026}
        told = burn_host(NodeContext({}, closing), question)
    names = [f"cuda:{gpu}" for gpu in gpus]
    assert told["products"].keys() == {"cpu", *names}
    assert told["copies"].keys() == {*names}
    assert len({each["checksum"] for each in told["products"].values()}) == 1
    for name in names:
        assert told["products"][name]["num_wrong"] == 0
        assert told["products"][name]["model"] == told["copies"][name]["model"]
        check_copies(told["copies"][name])
