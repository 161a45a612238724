"""Containers are like pods, and nothing of them stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.containers.pods import PodNetwork, PodSpec
from tests.limits import HANG_S, until

pytestmark = pytest.mark.soak

SHOWN = """
id -u; hostname -f; cd /
until found=$(getent hosts train-0.train); do :; done
echo $found
python -c "import ronde, socket; print(socket.getfqdn())"
touch /x /usr/x /tmp/x || df --output=size -B1 /dev/shm | tail -1
grep -E "^(CapBnd|NoNewPrivs)" /proc/self/status
cat /proc/self/cgroup | grep -c ronde-containers; getent hosts nobody.train || exit 3
"""


def test_a_container_is_like_a_pod(network: PodNetwork) -> None:
    memory = {"/dev/shm": 1 << 25, "/tmp": None}  # noqa: S108
    head = network.start(PodSpec("train-0", ["sleep", "1000"]))  # known while it runs
    words = ["sh", "-c", SHOWN]
    node = network.start(PodSpec("train-1", words, memory_folders=memory))
    assert node.wait() == 3, node.describe()
    user, name, found, full, size, caps, privileges, _ = node.out().splitlines()
    assert (user, name) == ("1000", "train-1.train.default.svc.cluster.local")
    assert found == f"{head.address} train-0.train.default.svc.cluster.local"
    assert full == name
    assert int(size) == 1 << 25
    assert caps.split() == ["CapBnd:", "0" * 16]
    assert privileges.split() == ["NoNewPrivs:", "1"]
    assert node.errors().count("Read-only file system") == 2, node.errors()
    assert node.exit_code == 3


def test_signals_reach_a_pod_and_its_name_can_be_used_again(
    network: PodNetwork,
) -> None:
    script = "trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.01; done"
    first = network.start(PodSpec("train-0", ["sh", "-c", script]))
    first.await_line("up")
    assert first.exec("id", "-u") == "1000\n"
    first.terminate()
    assert (first.wait(), first.out()) == (9, "up\nbye\n")
    second = network.start(PodSpec("train-0", ["sh", "-c", script]))
    second.await_line("up")
    second.kill()
    assert second.wait() == 137


OWNER = """
import time
from tests.containers.pods import PodSpec, pod_network
with pod_network() as network:
    pod = network.start(PodSpec("train-0", ["sleep", "1000"]))
    print(pod.init_pid, network.folder, flush=True)
    time.sleep(1000)
"""


@pytest.mark.usefixtures("network")  # where there can be none, this is skipped
def test_nothing_stays_of_a_network_whose_owner_is_killed() -> None:
    words = [sys.executable, "-c", OWNER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().split()[1])
        assert mentioning(folder.name)
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=HANG_S)
    until(lambda: not folder.exists() and not mentioning(folder.name))
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{folder.name}"))


def mentioning(name: str) -> list[Path]:
    """Return processes that have this in their arguments or groups."""
    found: list[Path] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_text() + (folder / "cgroup").read_text()
        except OSError:
            continue
        if name in text:
            found.append(folder)
    return found
