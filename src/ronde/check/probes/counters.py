"""Errors that links count, read a second time: those of RDMA ports or of PCI links."""

from ronde.check.facts import Reading, Value
from ronde.check.nvml.driver import NvmlDriver
from ronde.check.nvml.questions import GpuQuestion, HostQuestion
from ronde.check.probes.gpu_answers import ask_gpu
from ronde.check.probes.network_rdma import read_errors
from ronde.topology.probes.nvml import open_nvml

RDMA_ERRORS = "network.rdma_errors"
"""Fact: from ``read_errors``."""

PCIE_REPLAYS = "gpu.pcie_replays"
"""Fact: of each GPU how many packets were sent again; nothing: not told."""


def read(reading: Reading) -> None:
    """Take down the fact that settings name as ``fact``."""
    fact = reading.settings["fact"]
    if fact == RDMA_ERRORS:
        root = str(reading.settings.get("root", "/")).rstrip("/")
        reading.values[fact] = read_errors(root)
    else:
        reading.values[fact] = _read_replays()


def _read_replays() -> list[Value]:
    question = GpuQuestion.PCIE_REPLAYS
    with open_nvml() as nvml:
        driver = NvmlDriver(nvml)
        return [
            ask_gpu(driver, number, [question]).answers.get(question)
            for number in range(driver.ask_host(HostQuestion.NUM_GPUS))
        ]
