"""The ``run_ranks`` fixture reports failures, hangs and deaths of ranks."""

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.ranks import RankFailedError

pytestmark = pytest.mark.waits


def give_rank(communicator, offset):
    return communicator.rank + offset


def raise_on_rank_one(communicator):
    """The other ranks' PeerLostError must not hide this error."""
    if communicator.rank == 1:
        raise KeyError("rank one's own")
    communicator.barrier().wait()


def test_the_first_failure_is_raised(run_ranks):
    with pytest.raises(KeyError, match="rank one's own") as caught:
        run_ranks(3, raise_on_rank_one)
    assert "in raise_on_rank_one" in "".join(caught.value.__notes__)


def wait_in_vain(communicator, folder):
    """Wait for a message that is never sent."""
    (folder / str(communicator.rank)).write_text(str(os.getpid()))
    communicator.recv(torch.ones(1), 1 - communicator.rank).wait()


def test_a_rank_that_hangs_is_shown_and_killed(run_ranks, tmp_path):
    run_ranks(1, give_rank, 0)  # the fork server is up now
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, wait_in_vain, tmp_path, timeout_s=10.0)
    assert "rank 0 hung; its stacks:" in str(caught.value)
    assert "in wait_in_vain" in str(caught.value)
    for rank in (0, 1):
        assert not Path("/proc", (tmp_path / str(rank)).read_text()).exists()


def die(communicator):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_rank_is_reported(run_ranks):
    with pytest.raises(RankFailedError, match="rank 0 died: exit code -9"):
        run_ranks(1, die)
    assert run_ranks(2, die, dying={0, 1}) == [None, None]
