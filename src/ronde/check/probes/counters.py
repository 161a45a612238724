"""Errors that RDMA ports count, read a second time."""

from ronde.check.facts import Reading
from ronde.check.probes.network_rdma import read_errors

RDMA_ERRORS = "network.rdma_errors"
"""Fact: from ``read_errors``."""


def read(reading: Reading) -> None:
    """Read the counters."""
    reading.values[RDMA_ERRORS] = read_errors(reading.root)
