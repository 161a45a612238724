"""The hosts themselves: separate where hosts are, joined by ssh, gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT, why_not
from tests.limits import HANG_S

# What other tests stand on, and they would fail as well.
pytestmark = pytest.mark.soak
needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


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
