"""Files, terminals and lines that pause: a job on three hosts outlives them."""

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cluster.training import assert_nothing_left
from tests.limits import HANG_S, until
from tests.timed import LEASE_S, impatient_ronde

pytestmark = pytest.mark.waits

STALL_S = LEASE_S + 1.0
OUTAGE_S = 0.6 * LEASE_S
HOSTS = "node1:2,node2:1,node3:1"

# Says a line a hundredth of a second until SIGUSR1.
RANK = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
number = 0
while not signal.sigtimedwait({signal.SIGUSR1}, 0.01):
    os.write(1, b"%d\\n" % number)
    number += 1
"""


@contextmanager
def job(cluster, *options, hosts=HOSTS, rank=RANK, carrier=(), **popen):
    """Start ranks on all hosts."""
    words = [*impatient_ronde(), "run", "-H", hosts]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s"]
    with cluster.start(
        cluster.hosts[0],
        [*carrier, *words, *options, "--", sys.executable, "-I", "-S", "-c", rank],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        **popen,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def assert_runs_on(launcher, seconds):
    """Assert that the launcher does not end meanwhile."""
    launcher_fd = os.pidfd_open(launcher.program_pid())
    ended = select.select([launcher_fd], [], [], seconds)[0]
    os.close(launcher_fd)
    assert not ended, launcher.communicate(timeout=HANG_S)


@pytest.fixture
def disk(cluster, tmp_path):
    """Return a folder on node1 that is a file system of its own."""
    if not shutil.which("mkfs.ext4") or not shutil.which("fsfreeze"):
        pytest.skip("a disk that stalls needs mkfs.ext4 and fsfreeze")
    head, image, folder = cluster.hosts[0], tmp_path / "image", Path("/tmp/disk")  # noqa: S108
    with image.open("wb") as file:
        file.truncate(8 << 20)
    making = [shutil.which("mkfs.ext4"), "-q", image]
    subprocess.run(making, check=True, timeout=HANG_S)
    folder_words = ["sh", "-ec", f'mkdir {folder}; mount -n -o loop "$1" {folder}']
    made = cluster.run(head, [*folder_words, "sh", str(image)])
    if made.returncode:
        pytest.skip(f"a disk that stalls needs a loop device: {made.stderr}")
    yield folder
    undone = cluster.run(head, ["sh", "-ec", f"umount {folder}; rmdir {folder}"])
    assert undone.returncode == 0, undone.stderr


@contextmanager
def frozen(cluster, disk):
    """Let every write to a disk wait meanwhile."""

    def do(option):
        done = cluster.run(cluster.hosts[0], ["fsfreeze", option, str(disk)])
        assert done.returncode == 0, done.stderr

    do("-f")
    try:
        yield
    finally:
        do("-u")


def read_there(cluster, path):
    """Return what is in a file, or in files that match a pattern."""
    return cluster.run(cluster.hosts[0], ["sh", "-c", f"cat {path}"]).stdout


def into(path):
    """Return what runs a command with its standard output in a file."""
    return ["sh", "-c", f'exec "$@" >{path}', "sh"]


def test_a_disk_that_stalls_longer_than_a_lease_ends_no_job(cluster, disk):
    out = disk / "out"
    options = ["--log-dir", str(disk / "logs")]
    with job(cluster, *options, carrier=into(out)) as launcher:
        until(lambda: read_there(cluster, out))
        with frozen(cluster, disk):
            assert_runs_on(launcher, STALL_S)
        launcher.send_signal(signal.SIGUSR1)
        errors = launcher.communicate(timeout=HANG_S)[1]
        assert launcher.returncode == 0, errors
    assert errors == b""
    shown = read_there(cluster, out).splitlines()
    for rank, host in enumerate(("node1", "node1", "node2", "node3")):
        tag = f"[{host}:{rank}] "
        said = [line.removeprefix(tag) for line in shown if line.startswith(tag)]
        assert said == [str(number) for number in range(len(said))]
        logged = read_there(cluster, disk / f"logs/*/attempt_0/{rank}/stdout.log")
        assert logged.splitlines() == said
        # It was read all the time, as far as there was room.
        assert len(said) > 1
    assert_nothing_left(cluster)


def test_an_interrupt_ends_a_job_whose_disk_stalls(cluster, disk):
    out = disk / "out"
    options = ["--log-dir", str(disk / "logs")]
    with job(cluster, *options, carrier=into(out)) as launcher:
        until(lambda: read_there(cluster, out))
        with frozen(cluster, disk):
            launcher.send_signal(signal.SIGINT)
            code = launcher.wait(timeout=HANG_S)
        # What the kernel did not let die holds standard error up to here.
        errors = launcher.communicate(timeout=HANG_S)[1]
    assert code == 130, errors
    assert b"the last lines were not written" in errors
    assert_nothing_left(cluster)


def test_a_line_that_is_cut_for_less_than_a_lease_ends_no_job(cluster):
    with job(cluster, stdout=subprocess.PIPE) as launcher:
        tags = set()
        while len(tags) < 4:
            tags.add(launcher.stdout.readline().split()[0])
        # The controller is there: it hears of nobody, and nobody of it.
        cluster.cut(cluster.hosts[0])
        assert_runs_on(launcher, OUTAGE_S)
        cluster.restore(cluster.hosts[0])
        # TCP sends again what was lost after up to as long again.
        assert_runs_on(launcher, OUTAGE_S)
        launcher.send_signal(signal.SIGUSR1)
        errors = launcher.communicate(timeout=HANG_S)[1]
    assert launcher.returncode == 0, errors
    assert errors == b""
    assert_nothing_left(cluster)
