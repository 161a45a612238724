"""What a job on three hosts opens, and what its processes show to other users."""

import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.machines import ROOT
from tests.cluster.observation import Process, Socket
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

SSH_PORT = 22
LOOPBACK = ("127.0.0.1", "::1")
UNNAMED = "what-the-user-did-not-forward"
NAMED = "what-the-user-named"
ALLOWED = "what-is-on-the-list"
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    "HOME": str(Path.home()),
    "OMP_NUM_THREADS": "1",
    "SOMETHING": UNNAMED,
    "NCCL_API_TOKEN": UNNAMED,
    "GIVEN_TOKEN": NAMED,
    "TORCH_SAID": ALLOWED,
}
PLACES = [0, 0, 1, 2]

# Whether each of the addresses and ports named takes a connection.
KNOCK = """
import socket, sys
for place in sys.argv[1:]:
    address, _, port = place.rpartition("|")
    try:
        with socket.create_connection((address, int(port)), 2.0) as asking:
            print(address, port, flush=True)
    except OSError:
        pass
"""


@dataclass
class Job:
    """A job that runs on three hosts."""

    process: subprocess.Popen  # the controller
    processes: list[list[Process]]  # of each host
    sockets: list[list[Socket]]  # that listen on each host, without sshd's
    folder: Path


@contextmanager
def running_job(cluster, folder, *options):
    """Run ranks that have met and wait; end them in peace afterwards."""
    words = [sys.executable, "-m", "ronde", "run", "-H", "node1:2,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "-x", "GIVEN_TOKEN", *options]
    words += ["--", "python", "-m", "tests.cluster.waiting_rank", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with cluster.start(cluster.hosts[0], words, env=ENVIRONMENT, **pipes) as process:
        try:
            wait_for(process, [folder / f"ready.{rank}" for rank in range(4)])
            sockets = [
                [s for s in cluster.listening(host) if s.port != SSH_PORT]
                for host in cluster.hosts
            ]
            processes = [cluster.processes(host) for host in cluster.hosts]
            yield Job(process, processes, sockets, folder)
            (folder / "end").touch()
            output, _ = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, output
        finally:
            process.kill()
    assert [(folder / f"done.{rank}").read_text() for rank in range(4)] == ["4.0"] * 4


def wait_for(process, paths):
    ends_at = time.monotonic() + HANG_S
    while not all(path.exists() for path in paths):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < ends_at, "the ranks must meet"
        time.sleep(0.02)


@pytest.fixture(scope="class")
def job(three_hosts, tmp_path_factory):
    with running_job(three_hosts, tmp_path_factory.mktemp("job")) as found:
        yield found


def variables(process):
    """Return what a process was started with, by name."""
    entries = process.environment.decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def rank_of(process):
    """Return the rank that a process is, or None."""
    said = variables(process)
    return int(said["RANK"]) if "RONDE_COOKIE" in said else None


def ranks_by_pid(job):
    ranks = {p.pid: rank_of(p) for processes in job.processes for p in processes}
    found = {pid: rank for pid, rank in ranks.items() if rank is not None}
    assert sorted(found.values()) == [0, 1, 2, 3]
    return found


def scan(cluster, addresses):
    """Try every TCP port of some addresses, from some hosts at once.

    Args:
        addresses: By host, those that it tries.

    Returns:
        By host, the addresses and ports that took its connection.
    """
    program = [sys.executable, "-m", "tests.cluster.port_scan"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = {}
    with ExitStack() as stack:
        scanners = {}
        for host in cluster.hosts:
            words = [*program, *addresses[host.name]]
            scanners[host.name] = cluster.start(host, words, **pipes)
            stack.enter_context(scanners[host.name])
            stack.callback(scanners[host.name].kill)
        for name, scanner in scanners.items():
            out, errors = scanner.communicate(timeout=HANG_S)
            assert scanner.returncode == 0, errors
            places = [line.split() for line in out.splitlines()]
            found[name] = {(address, int(port)) for address, port in places}
    return found


def has_secret(text, known):
    """Return whether 32 hexadecimal digits stand anywhere but in paths known."""
    for path in sorted(map(str, known), key=len, reverse=True):
        text = text.replace(path, "/")
    return re.search(r"[0-9a-fA-F]{32}", text) is not None


class TestJob:
    """One job, whose ranks have met and wait."""

    def test_only_ranks_listen_each_on_the_chosen_address_of_its_host(
        self, cluster, job
    ):
        ranks = ranks_by_pid(job)
        for host, sockets in zip(cluster.hosts, job.sockets, strict=True):
            for found in sockets:
                assert found.protocol == "tcp", found
                assert found.address == host.address, found
                assert cluster.hosts[PLACES[ranks[found.pid]]] is host, found
        # All are Gloo's: one for tensors, and one for what ranks agree on where the
        # rank speaks for its host. The store has none.
        per_rank = [0] * 4
        for found in (each for sockets in job.sockets for each in sockets):
            per_rank[ranks[found.pid]] += 1
        assert per_rank == [2, 1, 2, 2]

    @pytest.mark.soak
    def test_a_scan_finds_no_port_open_once_the_ranks_have_met(self, cluster, job):
        """Of all addresses from another host, and of loopback from the host itself."""
        addresses, expected = {}, {}
        others = [*cluster.hosts[1:], cluster.hosts[0]]
        for host, other in zip(cluster.hosts, others, strict=True):
            tried = (*LOOPBACK, other.address, other.address6)
            addresses[host.name] = tried
            expected[host.name] = {(each, SSH_PORT) for each in tried}
        assert scan(cluster, addresses) == expected

    def test_the_ports_that_gloo_has_let_nobody_in(self, cluster, job):
        listening = {
            (found.address, found.port) for each in job.sockets for found in each
        }
        places = [f"{address}|{port}" for address, port in listening]
        words = [sys.executable, "-c", KNOCK, *places]
        done = cluster.run(cluster.hosts[2], words, timeout_s=HANG_S)
        assert done.returncode == 0, done.stderr
        assert (len(listening), done.stdout) == (7, "")

    def test_no_process_shows_what_it_should_keep(self, cluster, job):
        prefixes = (sys.prefix, sys.base_prefix, Path.home())
        known = (ROOT, *prefixes, cluster.folder, job.folder)
        ranks = ranks_by_pid(job)
        cookies = {variables(p).get("RONDE_COOKIE") for p in job.processes[0]} - {None}
        for number, processes in enumerate(job.processes):
            for process in processes:
                words = " ".join(process.words)
                for value in (UNNAMED, NAMED, ALLOWED):
                    assert value not in words, process
                assert not has_secret(words, known), process
                told = variables(process)
                random = {v for v in told.values() if has_secret(v, known)}
                assert random <= cookies, process
                # What runs on the user's own host has what the user has there.
                assert number == 0 or UNNAMED not in told.values(), process
                if process.pid in ranks:
                    assert told["GIVEN_TOKEN"] == NAMED
                    assert told["TORCH_SAID"] == ALLOWED
                elif number:
                    assert NAMED not in told.values(), process
        assert len(cookies) == 1


def test_before_the_ranks_listen_nobody_does(cluster, tmp_path):
    """Neither controller nor agents nor the held port: ranks that open nothing."""
    words = [sys.executable, "-m", "ronde", "run", "-H", "node1:2,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--", "sh", "-c"]
    stay = 'touch "$0/ready.$RANK"; until test -e "$0/end"; do sleep 0.05; done'
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with cluster.start(
        cluster.hosts[0], [*words, stay, str(tmp_path)], env=ENVIRONMENT, **pipes
    ) as process:
        try:
            wait_for(process, [tmp_path / f"ready.{rank}" for rank in range(4)])
            found = [cluster.listening(host) for host in cluster.hosts]
            (tmp_path / "end").touch()
            output, _ = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert {each.port for sockets in found for each in sockets} == {SSH_PORT}
