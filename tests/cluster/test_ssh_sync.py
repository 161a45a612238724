"""A folder that one host alone has is copied to the others."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

# Each host has a /tmp of its own; the name is one that a shell would take apart.
FOLDER = Path("/tmp/a program's $HOME/deep er")  # noqa: S108

DRIVER = """
import json, sys
from ronde.errors import HostError
from ronde.launch import (
    Host, InterruptedStartError, SshSpawner, caught_signals, sync_folder
)

folder, config, *names = sys.argv[1:]
spawner = SshSpawner(["-F", config])
with caught_signals() as signal_fd:
    print("begun", flush=True)
    try:
        done = sync_folder(folder, [Host(name) for name in names], spawner, signal_fd)
        said = {"done": done}
    except HostError as error:
        failures = error.failures
        said = {f.host: [f.failure.reason, f.failure.cure] for f in failures}
    except InterruptedStartError as error:
        said = {"signal": error.number}
print(json.dumps(said))
"""

FILL = """
mkdir -p "$1/pack age/__pycache__" "$1/.git" "$1/.venv/bin" "$1/empty"
cd "$1"
printf 'print(1)' >"main it.py"
printf '#!/bin/sh' >run
chmod 750 run
head -c 300000 /dev/urandom >"pack age/data"
ln -s "pack age/data" link
ln -s /nowhere broken
touch .git/config .venv/bin/python "pack age/__pycache__/x.pyc"
touch -d '2020-01-02 03:04:05' run
"""

# Names, kinds, modes, ends of links, sizes, times, and what is in the files.
LOOK = """
cd "$1" && find . ! -type d -printf '%P %y %m %l %s %TY-%Tm-%Td %TH:%TM\\n' | sort
find . -type d -printf '%P %m\\n' | sort
find . -type f -print0 | sort -z | xargs -0 sha256sum
"""


@pytest.fixture
def source(cluster):
    """Fill the folder on node1; take it away from all hosts."""
    shell(cluster, 0, FILL)
    yield FOLDER
    for number in range(len(cluster.hosts)):
        shell(cluster, number, 'rm -rf "$1"', FOLDER.parent)


def shell(cluster, number, script, folder=FOLDER):
    words = ["sh", "-ec", script, "sh", str(folder)]
    done = cluster.run(cluster.hosts[number], words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sync(cluster, *names):
    program = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={Path.home()}", sys.executable]
    words = [*program, "-c", DRIVER, str(FOLDER), str(cluster.ssh_config)]
    done = cluster.run(cluster.hosts[0], [*words, *names], timeout_s=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(cluster, numbers):
    wanted = shell(cluster, 0, 'rm -rf "$1/.git" "$1/.venv"; ' + DROP_CACHE + LOOK)
    for number in numbers:
        assert shell(cluster, number, LOOK) == wanted


DROP_CACHE = 'rm -rf "$1/pack age/__pycache__"; '


def noisy_sshd(cluster, host, script):
    script.write_text('#!/bin/sh\nprintf "hello\\n\\n"\neval "$SSH_ORIGINAL_COMMAND"\n')
    script.chmod(0o755)
    cluster.kill_sshd(host)
    cluster.start_sshd(host, "-o", f"ForceCommand={script}")


def test_a_copy_has_all_that_counts(cluster, source):
    said = sync(cluster, "node2", "node3")
    assert said["done"].startswith("5 files, 293KiB, copied to 2 hosts in ")
    assert_same(cluster, [1, 2])


def test_a_login_that_writes_does_not_harm_a_copy(cluster, source, tmp_path):
    noisy_sshd(cluster, cluster.hosts[1], tmp_path / "noisy")
    said = sync(cluster, "node2", "node3")
    cluster.kill_sshd(cluster.hosts[1])
    assert said["done"].startswith("5 files, ")
    assert_same(cluster, [1, 2])


def test_a_second_copy_changes_what_changed_and_deletes_nothing(cluster, source):
    sync(cluster, "node2")
    shell(cluster, 1, 'echo mine >"$1/checkpoint"')
    shell(cluster, 0, 'echo "print(2)" >"$1/main it.py"')
    sync(cluster, "node2")
    read = 'cat "$1/main it.py" "$1/checkpoint"'
    assert shell(cluster, 1, read) == "print(2)\nmine\n"


def test_hosts_that_do_not_get_it_are_told_by_name(cluster, source):
    shell(cluster, 1, 'mkdir -p "$1"; mount -t tmpfs -o size=64k,mode=755 none "$1"')
    try:
        said = sync(cluster, "node2", "node3", "10.77.0.77")
        assert said.keys() == {"node2", "10.77.0.77"}
        reason, cure = said["node2"]
        assert "No space left" in reason or "Wrote only" in reason
        assert cure == "see the space and the rights there"
        assert said["10.77.0.77"][0] == "not reached"
    finally:
        shell(cluster, 1, 'umount "$1"')
    assert_same(cluster, [2])


def test_ctrl_c_ends_a_copy(cluster, source):
    words = [sys.executable, "-c", DRIVER, str(FOLDER), str(cluster.ssh_config)]
    shell(cluster, 0, 'truncate -s 3G "$1/large"')
    with cluster.start(
        cluster.hosts[0],
        [*words, "node2"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        cwd=ROOT,
        stdout=subprocess.PIPE,
    ) as driver:
        assert driver.stdout.readline() == b"begun\n"
        driver.send_signal(signal.SIGINT)
        out, _ = driver.communicate(timeout=HANG_S)
    assert json.loads(out) == {"signal": signal.SIGINT}
    assert not copying_on(cluster.hosts[0], cluster)
    # The other end learns that its connection has ended a moment later.
    due_s = time.monotonic() + HANG_S
    while found := copying_on(cluster.hosts[1], cluster):
        assert time.monotonic() < due_s, found
        time.sleep(0.01)


def copying_on(host, cluster):
    return {at.name for at in cluster.processes(host)} & {"ssh", "tar"}
