"""The hosts that tests on several of them share."""

import functools
from collections.abc import Callable, Iterator

import pytest
from tests.cluster.machines import Cluster, machines, why_not
from tests.cluster.party import Party, open_party
from tests.cluster.training_rank import train
from tests.ranks import run_ranks_bare

import ronde.torch as hvd


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


@pytest.fixture
def party(cluster, tmp_path) -> Iterator[Party]:
    """Yield a job whose nodes join by themselves."""
    with open_party(cluster, tmp_path) as party:
        yield party


@pytest.fixture(scope="session")
def local_loss() -> Callable[[int], float]:
    """Return ``loss(size)``: of as many ranks on one host, with the engine ``gloo``.

    Gloo adds in an order that depends on the ranks alone, wherever they are: on several
    hosts its losses are the same to the last bit.
    """

    @functools.cache
    def loss(size: int) -> float:
        losses = run_ranks_bare(size, _train, environment={"RONDE_ENGINE": "gloo"})
        assert len(set(losses)) == 1
        return losses[0]

    return loss


def _train(_: object) -> float:
    loss = train()
    hvd.shutdown()
    return loss
