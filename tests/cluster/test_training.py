"""``ronde run`` on three hosts: a training ends as it does on one."""

import sys
from pathlib import Path

import pytest
from tests.cluster.training import Training, assert_done, assert_nothing_left, tolerance
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

HOSTS, SIZE = "node1:2,node2:1,node3:1", 4


def train(cluster, record, *options):
    """Train on node1's command; return the loss."""
    training = Training(record)
    words = [sys.executable, "-m", "ronde", "run", "-H", HOSTS]
    done = cluster.run(
        cluster.hosts[0],
        [*words, "--ssh-args", f"-F {cluster.ssh_config}", *options, *training.words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"},
        timeout_s=HANG_S,
    )
    assert_done(done)
    assert f"{SIZE} ranks have trained" in done.stdout
    return training.loss(SIZE)


def test_the_loss_on_three_hosts_is_that_on_one_to_the_last_bit(
    cluster, tmp_path, local_loss
):
    loss = train(cluster, tmp_path / "record", "--engine", "gloo")
    assert loss == local_loss(SIZE)
    assert_nothing_left(cluster)


@pytest.mark.soak
def test_two_levels_change_the_loss_by_no_more_than_their_roundings(
    cluster, tmp_path, local_loss
):
    """``auto`` adds large tensors host by host: in another order."""
    loss = train(cluster, tmp_path / "record")
    expected = local_loss(SIZE)
    assert abs(loss - expected) <= tolerance(SIZE, expected)
    assert_nothing_left(cluster)
