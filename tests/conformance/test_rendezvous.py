"""How ranks find each other under each launcher's environment, or with none's help."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from ronde.collectives import connect, rank_file
from ronde.errors import CollectiveError, WorldError
from ronde.world import Claim, Launcher, Meeting


def sum_of_ranks(claim):
    communicator = connect(claim, timeout_s=60.0)
    tensor = torch.tensor([communicator.rank + 1])
    total = int(communicator.all_reduce(tensor).wait().item())
    communicator.close()
    return total


@pytest.mark.parametrize("launcher", ["ronde", "torchrun", "plain"])
def test_ranks_meet_where_the_launcher_says(run_ranks_bare, launcher):
    assert run_ranks_bare(3, sum_of_ranks, launcher=launcher) == [6] * 3


def as_if_on_several_hosts(claim):
    """Use what torch finds by the host's own name, not the loopback."""
    alone = replace(
        claim, local_rank=0, local_size=1, cross_rank=claim.rank, cross_size=claim.size
    )
    return sum_of_ranks(alone)


def test_ranks_of_several_hosts_meet(run_ranks_bare):
    assert run_ranks_bare(2, as_if_on_several_hosts) == [3, 3]


def beside_torchs_own_group(claim, *, is_torch_first):
    """The program's own group shares the port, whichever comes first."""
    communicator = None if is_torch_first else connect(claim, timeout_s=60.0)
    dist.init_process_group("gloo")
    communicator = communicator or connect(claim, timeout_s=60.0)
    theirs, ours = torch.ones(2), torch.ones(2)
    dist.all_reduce(theirs)
    communicator.all_reduce(ours).wait()
    communicator.close()
    dist.all_reduce(theirs)
    dist.destroy_process_group()
    return theirs.tolist(), ours.tolist()


def torch_first(claim):
    return beside_torchs_own_group(claim, is_torch_first=True)


def ronde_first(claim):
    return beside_torchs_own_group(claim, is_torch_first=False)


@pytest.mark.parametrize("launcher", ["ronde", "torchrun", "plain"])
@pytest.mark.parametrize("order", [torch_first, ronde_first])
def test_torchs_own_group_may_share_the_port(run_ranks_bare, launcher, order):
    results = run_ranks_bare(2, order, launcher=launcher)
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
    """Return the claim of a launcher that says ranks and sizes, but no port."""
    rank = claim.rank % size
    return Claim(Launcher.OPEN_MPI, rank, size, rank, size, job_id=job_id)


def meet_by_file(claim, num_jobs):
    """The ranks of several jobs, of one launcher's process, at once."""
    size = claim.size // num_jobs
    job = claim.rank // size
    mine = unmet(claim, f"job {job}", size)
    communicator = connect(mine, timeout_s=60.0)
    jobs = communicator.all_gather(torch.tensor([job])).wait().tolist()
    communicator.barrier().wait()
    path = rank_file._directory() / rank_file._file_name(mine)
    return jobs, path.exists(), sum_of_ranks(mine)


def test_ranks_of_one_host_meet_by_a_file(run_ranks_bare):
    assert run_ranks_bare(3, meet_by_file, 1) == [([0, 0, 0], False, 6)] * 3


def test_two_jobs_do_not_mix(run_ranks_bare):
    results = run_ranks_bare(4, meet_by_file, 2)
    assert results == [([0, 0], False, 3)] * 2 + [([1, 1], False, 3)] * 2


def meet_despite_a_stale_file(claim, text):
    """Rank 0 comes only when rank 1 has seen what a killed job left behind."""
    mine = unmet(claim, "stale", claim.size)
    path = rank_file._directory() / rank_file._file_name(mine)
    if claim.rank == 1:
        path.write_text(text)
        assert rank_file._connect(path, 1, 1.0) is None
    store = dist.TCPStore("127.0.0.1", claim.meeting.port, wait_for_workers=False)
    if claim.rank == 1:
        store.set("seen", "")
    store.wait(["seen"])
    return sum_of_ranks(mine)


def test_a_file_left_behind_does_not_matter(run_ranks_bare):
    """Its port may be nobody's, a store's, or that of whoever says nothing at all."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ports = port, other.port, mute.getsockname()[1]
        for text in ("", "half", *(f"{port} token" for port in ports)):
            results = run_ranks_bare(
                2, meet_despite_a_stale_file, text, launcher="torchrun"
            )
            assert results == [3, 3]


def see_the_directory(claim):
    directory = rank_file._directory()
    connect(unmet(claim, "modes", 1), timeout_s=60.0)
    return directory.stat().st_mode & 0o777, directory.stat().st_uid


def test_the_file_is_the_users_alone(run_ranks_bare):
    assert run_ranks_bare(1, see_the_directory) == [(0o700, os.getuid())]


def say_why_nobody_came(claim):
    with pytest.raises(CollectiveError) as caught:
        connect(unmet(claim, "alone", 2), timeout_s=0.5)
    return str(caught.value)


def test_an_absent_rank_is_named(run_ranks_bare):
    (text,) = run_ranks_bare(1, say_why_nobody_came)
    assert "got no word from ranks [1] (1 in all)" in text
    assert "set MASTER_ADDR and MASTER_PORT" in text


def say_why_rank_zero_is_missed(claim):
    mine = replace(unmet(claim, "headless", 2), rank=1, local_rank=1)
    with pytest.raises(CollectiveError) as caught:
        connect(mine, timeout_s=0.5)
    return str(caught.value)


def test_an_absent_rank_zero_is_named(run_ranks_bare):
    (text,) = run_ranks_bare(1, say_why_rank_zero_is_missed)
    assert text.startswith("rank 0 must write ")
    assert "within 0.5 s" in text


def say_what_several_hosts_need(_claim):
    spread = Claim(Launcher.OPEN_MPI, 0, 4, 0, 2, job_id="spread")
    with pytest.raises(WorldError) as caught:
        connect(spread)
    return str(caught.value)


def test_several_hosts_need_an_address(run_ranks_bare, tmp_path):
    # It asks MPI, which leaves files where its process ends without it.
    place = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    (text,) = run_ranks_bare(1, say_what_several_hosts_need, environment=place)
    assert "MASTER_ADDR and MASTER_PORT must be set" in text


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meeting = Meeting("127.0.0.1", port)
        claim = Claim(Launcher.PLAIN, 0, 2, 0, 2, 0, 1, meeting)
        with pytest.raises(CollectiveError, match=f"MASTER_PORT must be free.* {port}"):
            connect(claim, timeout_s=5.0)


def test_alone_needs_nobody():
    communicator = connect(Claim(Launcher.NONE, 0, 1, 0, 1, 0, 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    ones = torch.ones(3)
    assert communicator.all_reduce(ones).wait() is ones
    assert len(list(Path("/proc/self/fd").iterdir())) == before
