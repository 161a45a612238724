"""``ronde ps``, and the tables that it reads, of jobs of each kind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import find_sockets, list_jobs, watch

TRAIN = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[3])
import torch
import torch.distributed as dist
import ronde.process_group
import ronde.torch as hvd
from tests.cluster.training_rank import Descent

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
wrapped = Descent(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(wrapped, model.named_parameters())
for step in range(6):
    if step == 4 and hvd.rank() == 2:  # a data loader that hangs
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.init_process_group("ronde")
group = dist.new_group([0, 2])
while dist.get_rank() == 0 and not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
if dist.get_rank() != 1:
    dist.barrier(group)
dist.barrier()
"""
ROOT = Path(__file__).parents[2]
ELASTIC = str(Path(__file__).with_name("elastic_rank.py"))


@contextmanager
def running(ronde, *words, env=None):
    """Start a job; yield its process and its table's socket."""
    with ronde.start("run", *words, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            pid = process.pid
            found = []
            while not found and process.poll() is None:
                found = [job for job in list_jobs() if job.job.head_pid == pid]
            yield process, found[0].socket if found else None
        finally:
            process.kill()


def await_table(path, is_there):
    """Return the first version of a table that is so."""
    for table in watch(path):
        if is_there(table):
            return table
    pytest.fail("the job is over")


def statuses(table):
    return [row.status for row in table.workers if row.status is not None]


def test_what_each_rank_does_is_listed_while_a_job_hangs(ronde, ronde_here, tmp_path):
    script, files = tmp_path / "train.py", [tmp_path / name for name in "ab"]
    script.write_text(TRAIN)
    words = ("-n", "3", sys.executable, *map(str, (script, *files, ROOT)))
    with running(ronde, *words) as (process, path):
        both = {0: (2,), 1: (2,)}
        table = await_table(path, lambda each: each.find_awaited() == both)
        assert [each.step for each in statuses(table)] == [4, 4, 4]
        first, _, late = table.workers
        assert (first.collective.kind, first.collective.group) == ("allreduce", "all")
        assert first.collective.name.startswith("gradients.")
        assert (first.collective.sequence, late.collective) == (5, None)
        assert first.collective.num_bytes >= 5 * 4
        assert [row.pid for row in table.workers] == [s.pid for s in statuses(table)]
        await_table(
            path, lambda each: min(r.collective_age_s for r in each.workers[:2]) >= 1.0
        )
        drawn = ronde_here("ps", "--all").stdout.decode()
        block = drawn[drawn.index(table.job.job_id) :].split("\n\n")[1].splitlines()
        assert "gradients." in block[1]
        assert block[1].split()[-1] == block[2].split()[-1] == "2"
        assert "not in a collective" in block[3]
        jobs = json.loads(ronde_here("ps", "--json").stdout)["jobs"]
        (own,) = [each for each in jobs if each["job_id"] == table.job.job_id]
        assert own["awaited_ranks"] == {"0": [2], "1": [2]}
        assert [each["status"]["step"] for each in own["workers"]] == [4, 4, 4]
        files[0].touch()
        # Groups of torch.
        expected = {1: (0, 2), 2: (0,)}
        table = await_table(path, lambda each: each.find_awaited() == expected)
        assert {each.step for each in statuses(table)} == {6}
        last = table.workers[2].collective
        assert (last.kind, last.ranks, last.sequence) == ("barrier", (0, 2), 1)
        files[1].touch()
        assert process.wait(HANG_S) == 0
    assert path not in find_sockets()
    assert not path.parent.exists()


def test_plain_programs_and_elastic_jobs_are_listed(ronde, ronde_here):
    env = {"PLAN": "{}", "LAST_VIEW": "9"}
    elastic = ("-np", "3", "--min-ranks", "2", "--", sys.executable, ELASTIC)
    with (
        running(ronde, "-n", "2", "/bin/sleep", "1000") as (plain, path),
        running(ronde, *elastic, env=env) as (process, other),
    ):
        table = await_table(other, lambda each: len(statuses(each)) == 3)
        await_table(other, lambda each: min(s.step for s in statuses(each)) > 1)
        os.kill(table.workers[1].pid, signal.SIGKILL)
        # Another worker takes its rank.
        table = await_table(
            other, lambda each: {row.worker for row in each.workers} == {0, 2, 3}
        )
        drawn = ronde_here("ps").stdout.decode()
        assert drawn.count("reports nothing") >= 2
        assert next(watch(path)).job.command == ("/bin/sleep", "1000")
        process.send_signal(signal.SIGTERM)
        plain.send_signal(signal.SIGTERM)
        for each in (plain, process):
            assert each.wait(HANG_S) == 143


def test_a_job_that_was_killed_leaves_a_socket_that_is_removed(ronde):
    with running(ronde, "-n", "2", "/bin/sleep", "1000") as (process, path):
        process.kill()
        process.wait(HANG_S)
        assert path.parent.exists()
        assert path not in find_sockets()
        assert not path.parent.exists()
