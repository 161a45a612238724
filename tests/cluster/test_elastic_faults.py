"""An elastic job on three hosts that loses its controller, or is split in two."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests import ledger
from tests.cluster.elastic_training_rank import BATCH, CHECKPOINT_EVERY, NUM_SAMPLES
from tests.limits import HANG_S, until

pytestmark = pytest.mark.waits

RANK = str(Path(__file__).with_name("elastic_training_rank.py"))


class Applied(NamedTuple):
    """A step that a rank has applied."""

    at_s: float
    view: int
    step: int


class Training:
    """A job under way, with a rank on each of its hosts."""

    def __init__(self, cluster, folder, launcher) -> None:
        self.cluster, self.folder, self.launcher = cluster, folder, launcher

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait(self, is_so):
        until(is_so, self.output)

    def applied(self, host="*") -> list[Applied]:
        """Return the steps that ranks on a host have applied, by time."""
        found: list[Applied] = []
        for path in self.folder.glob(f"applied-{host}-*"):
            *lines, _cut_off = path.read_text().split("\n")
            for line in lines:
                at_s, view, step = line.split()
                found.append(Applied(float(at_s), int(view), int(step)))
        return sorted(found)

    def is_running(self, host) -> bool:
        found = self.cluster.processes(host)
        return any(b"RONDE_COOKIE=" in process.environment for process in found)

    def kill_all(self, host) -> None:
        """Kill all that runs on a host but its sshd, which starts anew."""
        for process in self.cluster.processes(host):
            if process.pid != host.init_pid:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.cluster.start_sshd(host)


@contextmanager
def training(cluster, folder, hosts, *options):
    """Start a job, controlled by the first host, and wait until all ranks train."""
    words = [sys.executable, "-m", "ronde", "run", "-H", hosts, "--min-ranks", "1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s", *options]
    with (folder / "output").open("wb") as output:
        launcher = cluster.start(
            cluster.hosts[0],
            [*words, "--", sys.executable, RANK, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    job, size = Training(cluster, folder, launcher), hosts.count(":")
    with launcher:
        try:
            paths = folder.glob
            job.wait(lambda: len([*paths("applied-*")]) == size and job.applied())
            first = job.applied()[0].step
            job.wait(lambda: job.applied()[-1].step > first + 3 * CHECKPOINT_EVERY)
            yield job
        finally:
            launcher.kill()


def problems_of(*folders: Path) -> list[str]:
    entries = ledger.read([p for f in folders for p in f.glob("ledger-*")])
    return ledger.problems_of(entries, NUM_SAMPLES, 0, batch_size=BATCH)


def resume(cluster, folder, hosts):
    """Start a job again that was lost, end it; see that it went on where it must."""
    lost = folder / "lost"
    lost.mkdir()
    for path in [*folder.glob("ledger-*"), *folder.glob("applied-*")]:
        path.rename(lost / path.name)
    assert problems_of(lost) == []
    newest = max(int(p.stem[5:]) for p in (folder / "state").glob("step-*.pt"))
    with training(cluster, folder, hosts) as job:
        (folder / "finish").touch()
        assert job.launcher.wait(HANG_S) == 0, job.output()
    assert f"Resuming from the checkpoint of step {newest}." in job.output()
    assert job.applied()[0].step == newest
    # What follows the checkpoint is done again, in a job whose views count anew.
    before = [e for e in ledger.read(lost.glob("ledger-*")) if e.step < newest]
    after = [
        e._replace(view=e.view + 100) for e in ledger.read(folder.glob("ledger-*"))
    ]
    num_epochs = 1 + max(entry.epoch for entry in after)
    found = ledger.problems_of(
        before + after, NUM_SAMPLES, num_epochs, batch_size=BATCH
    )
    assert found == []


@pytest.mark.parametrize(
    ("how", "hosts"),
    [
        ("killed", "node1:1,node2:1,node3:1"),
        pytest.param("cut off", "node2:1,node3:1", marks=pytest.mark.soak),
    ],
)
def test_a_job_whose_controller_is_gone_ends_everywhere(cluster, tmp_path, how, hosts):
    with training(cluster, tmp_path, hosts) as job:
        if how == "killed":
            job.launcher.kill()
        else:
            cluster.cut(cluster.hosts[0])
        job.wait(lambda: not any(map(job.is_running, cluster.hosts)))
        assert job.launcher.wait(HANG_S) != 0
    cluster.heal()
    resume(cluster, tmp_path, hosts)


def test_a_host_that_is_cut_off_trains_nothing_and_comes_back(cluster, tmp_path):
    *_, third = cluster.hosts
    hosts = "node1:1,node2:1,node3:1"
    with training(cluster, tmp_path, hosts, "--cooldown", "1s,2s") as job:
        cluster.cut(third)
        job.wait(lambda: not job.is_running(third))
        job.wait(lambda: job.applied()[-1].view == 1)
        last_there = job.applied("node3")[-1]
        first_after = next(each for each in job.applied() if each.view == 1)
        assert last_there.at_s < first_after.at_s
        assert last_there.step <= first_after.step
        assert "node3 was lost: " in job.output()
        cluster.restore(third)
        job.wait(lambda: job.applied("node3")[-1].view > 1)
        (tmp_path / "finish").touch()
        assert job.launcher.wait(HANG_S) == 0, job.output()
    assert "a rank joins on node3; 2 ranks became 3 and go on" in job.output()
    assert problems_of(tmp_path) == []


@pytest.mark.soak
def test_a_rank_that_starts_elsewhere_does_not_hide_that_a_host_is_silent(
    cluster, tmp_path
):
    _, second, third = cluster.hosts
    hosts = "node1:1,node2:1,node3:1"
    with training(cluster, tmp_path, hosts, "--cooldown", "3s,3s") as job:
        (tmp_path / "hold").touch()
        job.kill_all(second)
        job.wait(lambda: job.applied()[-1].view == 1)
        job.wait(lambda: any(RANK in p.words for p in cluster.processes(second)))
        cluster.cut(third)
        job.wait(lambda: job.applied()[-1].view == 2)
        assert "node3 was lost: " in job.output()
        (tmp_path / "hold").unlink()
        (tmp_path / "finish").touch()
        assert job.launcher.wait(HANG_S) == 0, job.output()
    assert problems_of(tmp_path) == []
