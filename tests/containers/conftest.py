"""The network of pods that tests in containers share."""

from collections.abc import Iterator

import pytest
from tests.cluster.conftest import local_loss
from tests.containers.pods import PodNetwork, pod_network, why_not

__all__ = ["local_loss"]


@pytest.fixture(scope="session")
def shared_network() -> Iterator[PodNetwork]:
    """Yield a network, which costs 0.3 s; skip where there can be no containers."""
    if reason := why_not():
        pytest.skip(reason)
    with pod_network() as network:
        yield network


@pytest.fixture
def network(shared_network: PodNetwork) -> Iterator[PodNetwork]:
    """Yield a network without pods; those of a test end with it."""
    yield shared_network
    shared_network.kill_all()
