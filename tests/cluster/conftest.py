"""The hosts that tests on several of them share."""

import functools
import os
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.cluster.machines import Cluster, machines, why_not
from tests.cluster.training import LIMIT_S, Training, assert_done


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


@pytest.fixture(scope="session")
def local_loss(three_hosts, tmp_path_factory) -> Callable[[int], float]:
    """Return ``loss(size)``: of as many ranks on one host, with the engine ``gloo``.

    Gloo adds in an order that depends on the ranks alone, wherever they are: on several
    hosts its losses are the same to the last bit.
    """

    @functools.cache
    def loss(size: int) -> float:
        training = Training(tmp_path_factory.mktemp("local") / "record")
        words = [sys.executable, "-m", "ronde", "run", "-n", str(size)]
        environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}
        done = three_hosts.run(
            three_hosts.hosts[0],
            [*words, "--engine", "gloo", "--", *training.words],
            env=environment,
            timeout_s=LIMIT_S,
        )
        assert_done(done)
        return training.loss(size)

    return loss
