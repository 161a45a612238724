"""The hosts that tests on several of them share."""

from collections.abc import Iterator

import pytest
from tests.cluster.machines import Cluster, machines, why_not


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory) -> Iterator[Cluster]:
    """Return hosts ``node1`` to ``node3``, which see pytest's folders as one disk."""
    if reason := why_not():
        pytest.skip(reason)
    with machines(3, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture
def cluster(three_hosts) -> Iterator[Cluster]:
    """Return the three hosts; what a test does to them is undone after it."""
    yield three_hosts
    three_hosts.heal()
