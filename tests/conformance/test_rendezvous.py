"""Rendezvous of ranks under each launcher's environment, or without a launcher."""

import os
import socket
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.limits import HANG_S
from torch import distributed as dist

from ronde.collectives import connect, join_at, socket_name, socket_prefix, store_at
from ronde.errors import CollectiveError, WorldError
from ronde.store import own_directories, remove, serve_locally
from ronde.world import Launcher, Meeting, RankInfo


def sum_of_ranks(claim):
    """Return a sum over a duplicate, whose connection uses the store again."""
    communicator = connect(claim, timeout_s=HANG_S)
    copy = communicator.duplicate()
    tensor = torch.tensor([communicator.rank + 1])
    total = int(copy.all_reduce(tensor).wait().item())
    copy.close()
    communicator.close()
    return total


@pytest.mark.parametrize("launcher", ["ronde", "torchrun", "plain"])
def test_ranks_rendezvous_at_the_launchers_address(run_ranks_bare, launcher):
    assert run_ranks_bare(3, sum_of_ranks, launcher=launcher) == [6] * 3


def as_if_on_several_hosts(claim):
    """Connect through the host's own address instead of the loopback."""
    alone = claim._replace(
        local_rank=0, local_size=1, cross_rank=claim.rank, cross_size=claim.size
    )
    return sum_of_ranks(alone)


def test_ranks_of_several_hosts_rendezvous(run_ranks_bare):
    assert run_ranks_bare(2, as_if_on_several_hosts) == [3, 3]


def beside_torchs_own_group(claim, is_torch_first):
    """The program's own process group shares the port, made before or after ours."""
    communicator = None if is_torch_first else connect(claim, timeout_s=HANG_S)
    dist.init_process_group("gloo")
    communicator = communicator or connect(claim, timeout_s=HANG_S)
    theirs, ours = torch.ones(2), torch.ones(2)
    dist.all_reduce(theirs)
    communicator.all_reduce(ours).wait()
    communicator.close()
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


@pytest.mark.parametrize(
    ("launcher", "is_torch_first"),
    [("ronde", False), ("torchrun", True), ("plain", True), ("plain", False)],
)
def test_torchs_own_group_may_share_the_port(run_ranks_bare, launcher, is_torch_first):
    results = run_ranks_bare(
        2, beside_torchs_own_group, is_torch_first, launcher=launcher
    )
    assert results == [([4.0, 4.0], [2.0, 2.0])] * 2


def say_the_attempt(claim):
    return claim.meeting.attempt, sum_of_ranks(claim)


@pytest.mark.parametrize("variable", ["RONDE_EPOCH", "TORCHELASTIC_RESTART_COUNT"])
def test_generations_do_not_share_keys(run_ranks_bare, variable):
    launcher = "ronde" if variable == "RONDE_EPOCH" else "torchrun"
    later = {variable: "3"}
    results = run_ranks_bare(2, say_the_attempt, launcher=launcher, environment=later)
    assert results == [(3, 3)] * 2


def unmet(claim, job_id, size):
    """Return the info of a launcher that gives ranks and sizes, but no port."""
    rank = claim.rank % size
    return RankInfo(Launcher.OPEN_MPI, rank, size, rank, size, job_id=job_id)


def own_entries(name):
    """Return the sockets of this name in this user's directories."""
    return [d / name for d in own_directories("ronde-ranks-") if (d / name).exists()]


def meet_locally(claim, num_jobs):
    """Connect the ranks of several jobs of one launcher at the same time."""
    size = claim.size // num_jobs
    job = claim.rank // size
    mine = unmet(claim, f"job {job}", size)
    communicator = connect(mine, timeout_s=HANG_S)
    jobs = communicator.all_gather(torch.tensor([job])).wait().tolist()
    communicator.barrier().wait()
    return jobs, own_entries(socket_name(mine)), sum_of_ranks(mine)


def test_two_jobs_do_not_mix(run_ranks_bare):
    results = run_ranks_bare(4, meet_locally, 2)
    assert results == [([0, 0], [], 3)] * 2 + [([1, 1], [], 3)] * 2


def meet_despite_what_is_there(claim, kind, folder):
    """Rank 0 connects only after rank 1 has found a stale socket."""
    mine = unmet(claim, f"stale {kind}", claim.size)
    if claim.rank == 1:
        directory = Path(tempfile.mkdtemp(prefix=socket_prefix(), dir="/tmp"))
        path = directory / socket_name(mine)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        if kind == "earlier":
            # The store of a program that was started before by the same launcher.
            listener.listen()
            earlier = serve_locally(listener, 8)
            store = store_at(str(path), HANG_S)
            store.set("ronde/joined/1", "taken")
        else:
            listener.close()
        assert join_at(str(path), mine, 1.0) is None
        (folder / kind).touch()
    while not (folder / kind).exists():
        time.sleep(0.01)
    total = sum_of_ranks(mine)
    if claim.rank == 1 and kind == "earlier":
        earlier.close()
        remove(directory)
    return total, claim.rank and directory.exists()


@pytest.mark.parametrize("kind", ["killed", "earlier"])
def test_a_socket_left_behind_does_not_matter(run_ranks_bare, tmp_path, kind):
    results = run_ranks_bare(2, meet_despite_what_is_there, kind, tmp_path)
    assert results == [(3, 0), (3, False)]


def see_the_directory(claim):
    mine = unmet(claim, "modes", 2)
    sum_of_ranks(mine)
    found = [path.stat() for path in own_directories(socket_prefix())]
    return {(each.st_mode & 0o777, each.st_uid) for each in found}


def test_the_directory_is_the_users_alone(run_ranks_bare):
    assert run_ranks_bare(2, see_the_directory) == [{(0o700, os.getuid())}] * 2


def connect_alone(claim):
    """Connect as one of two ranks, without the other."""
    texts = []
    for rank in (0, 1):
        mine = unmet(claim, f"without {1 - rank}", 2)
        with pytest.raises(CollectiveError) as caught:
            connect(mine._replace(rank=rank, local_rank=rank), timeout_s=0.5)
        texts.append(str(caught.value))
    return texts


def test_an_absent_rank_is_named(run_ranks_bare):
    [[first, second]] = run_ranks_bare(1, connect_alone)
    assert "1 of 2 ranks did not join within" in first
    assert "set MASTER_ADDR and MASTER_PORT" in first
    assert second.startswith("rank 1 found no socket of rank 0 in")
    assert "within 0.5 s" in second


def say_what_several_hosts_need(_claim):
    spread = RankInfo(Launcher.OPEN_MPI, 0, 4, 0, 2, job_id="spread")
    with pytest.raises(WorldError) as caught:
        connect(spread)
    return str(caught.value)


def test_several_hosts_need_an_address(run_ranks_bare, tmp_path):
    # It asks MPI, which leaves files where its process ends without it.
    place = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    (text,) = run_ranks_bare(1, say_what_several_hosts_need, environment=place)
    assert "Set MASTER_ADDR and MASTER_PORT" in text


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meeting = Meeting("127.0.0.1", port)
        claim = RankInfo(Launcher.PLAIN, 0, 2, 0, 2, 0, 1, meeting)
        with pytest.raises(CollectiveError, match=f"MASTER_PORT {port} is in use"):
            connect(claim, timeout_s=HANG_S)


def test_one_rank_opens_no_descriptors():
    communicator = connect(RankInfo(Launcher.NONE, 0, 1, 0, 1, 0, 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    ones = torch.ones(3)
    assert communicator.all_reduce(ones).wait() is ones
    assert len(list(Path("/proc/self/fd").iterdir())) == before
