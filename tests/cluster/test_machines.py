"""The hosts themselves: separate where hosts are, joined by ssh, gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT, machines, why_not
from tests.limits import HANG_S

import ronde

# What other tests stand on, and they would fail as well.
pytestmark = pytest.mark.soak
needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
SOURCES = Path(ronde.__file__).parents[1]


def until(condition, what):
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.005)


def ssh(cluster, start, target, *words):
    options = ["-F", str(cluster.ssh_config)]
    for option in ("BatchMode=yes", "ConnectTimeout=2"):
        options += ["-o", option]
    return cluster.run(start, ["ssh", *options, "--", target, *words])


@pytest.mark.parametrize("at", ["name", "address", "address6"])
def test_every_host_reaches_every_host_by_ssh(cluster, at):
    for start in cluster.hosts:
        for target in cluster.hosts:
            done = ssh(cluster, start, getattr(target, at), "hostname")
            assert (done.returncode, done.stdout) == (0, f"{target.name}\n"), done


def test_hosts_share_the_disk_but_not_what_is_a_hosts_own(cluster, tmp_path):
    first, second, _ = cluster.hosts
    for place in ("/tmp", "/dev/shm", "/run"):  # noqa: S108
        cluster.run(first, ["touch", f"{place}/left-here"])
        assert cluster.run(first, ["ls", f"{place}/left-here"]).returncode == 0
        assert cluster.run(second, ["ls", f"{place}/left-here"]).returncode != 0
        assert not Path(place, "left-here").exists()
    cluster.run(first, ["touch", str(tmp_path / "shared")])
    assert cluster.run(second, ["ls", str(tmp_path / "shared")]).returncode == 0
    seen = cluster.run(first, ["ls", "/sys/class/net", "/sys/fs/cgroup"]).stdout
    assert "eth0" in seen
    assert next(Path("/sys/fs/cgroup").iterdir()).name in seen
    program = [sys.executable, "-c", "import ronde; print(ronde.__file__)"]
    assert cluster.run(second, program).stdout == f"{ronde.__file__}\n"


def test_processes_and_sockets_of_a_host_are_seen_with_their_owners(cluster):
    host = cluster.hosts[1]
    script = (
        "import os, socket; s = socket.create_server(('10.77.0.2', 0)); "
        "t = socket.create_server(('::', 0), family=socket.AF_INET6); "
        "print(s.getsockname()[1], t.getsockname()[1], os.getpid(), flush=True); "
        "input()"
    )
    listener = cluster.start(
        host,
        [sys.executable, "-c", script],
        env={"MARK": "of-this-test"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with listener:
        port, port6, inner = map(int, listener.stdout.readline().split())
        marked = [
            process
            for process in cluster.processes(host)
            if b"MARK=of-this-test" in process.environment.split(b"\0")
        ]
        assert [process.pid for process in marked] == [listener.program_pid()]
        assert inner != marked[0].pid
        assert marked[0].words[-1] == script
        told = {(found.address, found.port): found for found in cluster.listening(host)}
        assert told["10.77.0.2", port].pid == marked[0].pid
        assert told["::", port6].words == marked[0].words
        assert "sshd" in told["0.0.0.0", 22].words[0]  # noqa: S104
        other = {found.port for found in cluster.listening(cluster.hosts[0])}
        assert port not in other
        assert not any(
            b"of-this-test" in process.environment
            for process in cluster.processes(cluster.hosts[0])
        )
        listener.send_signal(signal.SIGINT)
        assert listener.wait(HANG_S) == -signal.SIGINT


def test_a_cut_link_lets_nothing_through_until_it_is_restored(cluster):
    first, second, third = cluster.hosts
    connect = [
        sys.executable,
        "-c",
        "import socket, sys; socket.create_connection((sys.argv[1], 22), 0.5)",
        second.address,
    ]
    assert cluster.run(first, connect).returncode == 0
    cluster.cut(second)
    done = cluster.run(first, connect)
    assert "timed out" in done.stderr or "No route" in done.stderr
    carrier = cluster.run(second, ["cat", "/sys/class/net/eth0/carrier"])
    assert carrier.stdout == "1\n"
    assert cluster.run(third, [*connect[:-1], first.address]).returncode == 0
    cluster.restore(second)
    assert cluster.run(first, connect).returncode == 0


_TWO_TO_ONE = """
import socket, sys, threading, time
SIZE = 4_000_000
def send(peer):
    peer.sendall(bytes(SIZE))
    peer.recv(1)
def receive(peer):
    got = 0
    while got < SIZE:
        got += len(peer.recv(1 << 16))
    peer.sendall(b".")
if sys.argv[1:]:
    with socket.create_connection(("10.77.0.1", 7)) as head:
        receive(head)
        # Nothing may be under way before the clock runs.
        head.recv(1)
        send(head)
else:
    with socket.create_server(("10.77.0.1", 7)) as listener:
        print("up", flush=True)
        peers = [listener.accept()[0] for _ in range(2)]
    for work in (send, receive):
        start = time.monotonic()
        if work is receive:
            [peer.sendall(b"!") for peer in peers]
        threads = [threading.Thread(target=work, args=(peer,)) for peer in peers]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(time.monotonic() - start, flush=True)
    [peer.close() for peer in peers]
"""


@needs_hosts
def test_a_link_is_slow_in_both_directions():
    """Two hosts' links carry twice 4 MB in 0.32 s; the one that they share, in 0.64."""
    with machines(3, rate="100mbit") as cluster:
        head, *others = cluster.hosts
        words = [sys.executable, "-c", _TWO_TO_ONE]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        with cluster.start(head, words, **pipes) as server:
            assert server.stdout.readline() == "up\n"
            clients = [cluster.start(other, [*words, "client"]) for other in others]
            out, _ = server.communicate(timeout=HANG_S)
            assert [client.wait(HANG_S) for client in clients] == [0, 0]
    out_s, in_s = map(float, out.split())
    assert out_s > 0.6
    assert in_s > 0.6


def test_a_dead_sshd_and_a_crashed_host_come_back(cluster):
    first, second, third = cluster.hosts
    words = [sys.executable, "-c", "print('there', flush=True); input()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    left = cluster.start(second, words, **pipes)
    gone = cluster.start(third, words, **pipes)
    assert left.stdout.readline() == gone.stdout.readline() == "there\n"
    cluster.kill_sshd(second)
    assert ssh(cluster, first, "node2", "true").returncode == 255
    assert left.poll() is None
    left.kill()
    left.communicate(timeout=HANG_S)
    assert left.returncode == -signal.SIGKILL
    cluster.crash(third)
    assert gone.wait(HANG_S) == -signal.SIGKILL
    gone.communicate(timeout=HANG_S)
    assert ssh(cluster, first, "node3", "true").returncode == 255
    cluster.heal()
    assert ssh(cluster, first, "node2", "true").returncode == 0
    assert ssh(cluster, first, "node3", "true").returncode == 0


@needs_hosts
def test_private_folders_are_empty_and_python_is_there_all_the_same(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "file").touch()
    with machines(2, private=[folder, SOURCES], shared=[tmp_path]) as cluster:
        first, second = cluster.hosts
        assert cluster.run(first, ["ls", "-A", str(folder)]).stdout == ""
        cluster.run(first, ["touch", str(folder / "own")])
        assert cluster.run(second, ["ls", "-A", str(folder)]).stdout == ""
        program = [sys.executable, "-c", "print(1); import ronde"]
        done = cluster.run(second, program)
        assert done.stdout == "1\n"
        assert "No module named 'ronde'" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["file"]


_ENDED = """
import os, sys
from tests.cluster.machines import machines
with machines(2) as cluster:
    inits = [host.init_pid for host in cluster.hosts]
    process = cluster.start(cluster.hosts[1], ["setsid", "sleep", "1000"])
    print(cluster.folder, process.program_pid(), *inits, flush=True)
    input()
"""


@needs_hosts
@pytest.mark.parametrize("how", ["end", "SIGINT", "SIGKILL"])
def test_nothing_stays(how):
    with subprocess.Popen(
        [sys.executable, "-c", _ENDED],
        cwd=ROOT,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as maker:
        folder, *pids = maker.stdout.readline().split()
        assert all(Path("/proc", pid).exists() for pid in pids)
        assert Path(folder).exists()
        if how == "end":
            maker.stdin.write("\n")
            maker.stdin.flush()
        else:
            maker.send_signal(getattr(signal, how))
        maker.communicate(timeout=HANG_S)
        until(
            lambda: not any(Path("/proc", pid).exists() for pid in pids),
            "all processes of the hosts must be gone",
        )
        assert Path(folder).exists() == (how == "SIGKILL")
        if how == "SIGKILL":
            subprocess.run(["rm", "-r", folder], check=True)  # noqa: S607
