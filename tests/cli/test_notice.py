"""The process that looks for notice of a host's end, beside the ranks of one host."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S, until

from ronde.processes import descendants

ROOT = Path(__file__).parents[2]
RANK = str(Path(__file__).with_name("elastic_rank.py"))
TRAIN = """
import sys
import time
sys.path.insert(0, sys.argv[2])
import torch
import ronde.torch as hvd
from tests.cluster.training_rank import Descent

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = Descent(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loop = hvd.elastic.Loop(
    model, optimizer, data, batch=8, epochs=10**6,
    checkpoint=sys.argv[1], checkpoint_every=10**6,
    on_change=lambda: print("from step", loop.num_applied, flush=True),
)
for step in loop:
    with step:
        model(step.inputs[0]).sum().backward()
        optimizer.step()
    time.sleep(0.01)
"""


@pytest.fixture
def start(ronde, tmp_path):
    """Start a job that ends when the file ``seen`` is there; yield both."""
    seen = tmp_path / "seen"

    def start(notice):
        plan = {f"{number}:9": f"exit when {seen}" for number in range(2)}
        env = {"PLAN": json.dumps(plan), "LAST_VIEW": "9"}
        words = ("run", "-np", "2", "--min-ranks", "1", "--notice", notice)
        program = ("--", sys.executable, RANK)
        return ronde.start(*words, *program, env=env, stderr=subprocess.STDOUT), seen

    return start


def find_pollers(pid):
    found = [process.pid for process in descendants(pid)]
    return [n for n in found if b"ronde.launch.agent.notices" in read_words(n)]


def read_words(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for_poller(process):
    until(lambda: find_pollers(process.pid))
    [poller] = find_pollers(process.pid)
    return poller


@pytest.mark.parametrize("notice", ["signal", "signal,file:/nowhere"])
def test_one_process_looks_for_notice_and_ends_with_the_job(start, notice):
    process, seen = start(notice)
    with process:
        poller = None if notice == "signal" else wait_for_poller(process)
        seen.touch()
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    assert output == b""
    assert poller is None or not Path(f"/proc/{poller}").exists()


def test_its_own_end_is_reported_and_harms_nothing(start):
    process, seen = start("file:/nowhere")
    with process:
        os.kill(wait_for_poller(process), signal.SIGKILL)
        line = process.stdout.readline()
        seen.touch()
        rest, _ = process.communicate(timeout=HANG_S)
    assert (process.returncode, rest) == (0, b"")
    assert line == b"ronde: --notice: the process that polls has ended.\n"


def test_it_ends_with_an_agent_that_was_killed(start):
    process, _ = start("file:/nowhere")
    with process:
        poller = wait_for_poller(process)
        status = Path(f"/proc/{poller}/status").read_text()
        os.kill(int(status.partition("\nPPid:\t")[2].split()[0]), signal.SIGKILL)
        process.communicate(timeout=HANG_S)
    assert process.returncode != 0
    assert not Path(f"/proc/{poller}").exists()


def test_a_checkpoint_is_written_where_all_hosts_are_about_to_end(ronde, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    program = ("--", sys.executable, "train.py", "state", str(ROOT))
    words = ("run", "-np", "2", "--min-ranks", "1", "--notice", "file:taken", *program)
    with ronde.start(*words, cwd=tmp_path) as process:
        assert read_first_step(process) == 0
        (tmp_path / "taken").touch()
        until(lambda: any((tmp_path / "state").glob("step-*.pt")))
        (tmp_path / "taken").unlink()
        process.terminate()
        _, shown = process.communicate(timeout=HANG_S)
    assert b"taken is there; its ranks stay until the others can do" in shown
    with ronde.start("run", "-np", "1", *program, cwd=tmp_path) as process:
        assert read_first_step(process) > 0
        process.terminate()
        process.communicate(timeout=HANG_S)


def read_first_step(process):
    return int(process.stdout.readline().split()[-1])
