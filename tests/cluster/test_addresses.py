"""Addresses and meeting places between real hosts, whatever their names lead to."""

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.collectives import step_ports

pytestmark = pytest.mark.waits

PORT = 20_001  # below what the kernel gives to outgoing connections
PYTHON = sys.executable
BIN = str(Path(PYTHON).parent)
WELL_KNOWN = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": "/root", "OMP_NUM_THREADS": "1"}
PLACES = [0, 0, 1, 2]
"""Where four ranks are: the first host has two."""

DEADLINE_S = 5 * HANG_S
LOCATE = """
import sys
from ronde.launch import locate
print(",".join(locate(sys.argv[3:], int(sys.argv[1]), float(sys.argv[2]))))
"""
SEE = """
from ronde.addresses import read_interfaces
print([(i.interface, i.address, i.prefix_length) for i in read_interfaces()])
"""
BLOCK = """
import socket, sys
with socket.socket() as held:
    held.bind((sys.argv[1], int(sys.argv[2])))
    held.listen()
    print("listening", flush=True)
    sys.stdin.read()
"""


def locate(cluster, host, port, *addresses, deadline_s=DEADLINE_S):
    """Return a host's own addresses towards others."""
    words = [PYTHON, "-c", LOCATE, str(port), str(deadline_s), *addresses]
    done = cluster.run(cluster.hosts[host], words)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n").split(",")


def on(cluster, host, *words):
    done = cluster.run(cluster.hosts[host], words)
    assert done.returncode == 0, done.stderr


@contextmanager
def addresses_on(cluster, host, link, *addresses):
    """Give a host a link of its own, as containers' bridges are."""
    on(cluster, host, "ip", "link", "add", link, "type", "bridge")
    on(cluster, host, "ip", "link", "set", link, "up")
    for address in addresses:
        on(cluster, host, "ip", "address", "add", address, "dev", link)
    try:
        yield
    finally:
        on(cluster, host, "ip", "link", "del", link)


def test_a_host_says_from_where_it_reaches_others(cluster):
    there = ["10.77.0.1", "fd77::1", "10.77.0.2", "fd77::2", "127.0.0.1", "10.99.0.1"]
    told = locate(cluster, 1, 0, *there)
    assert told == ["10.77.0.2", "fd77::2", "", "", "", ""]


def test_a_port_that_is_bound_answers_before_it_listens(cluster):
    told = locate(cluster, 1, PORT, "10.77.0.1", "fd77::1", "10.77.0.2")
    assert told == ["10.77.0.2", "fd77::2", ""]
    told = locate(cluster, 1, 22, "10.77.0.1", "fd77::1")
    assert told == ["10.77.0.2", "fd77::2"]


def test_a_host_that_is_cut_off_does_not_answer(cluster):
    cluster.cut(cluster.hosts[2])
    there = ["10.77.0.3", "fd77::3", "10.77.0.1"]
    told = locate(cluster, 1, PORT, *there, deadline_s=1.0)
    assert told == ["", "", "10.77.0.2"]
    on(cluster, 1, "ip", "route", "add", "blackhole", "10.77.0.1/32")
    try:
        told = locate(cluster, 1, 0, "10.77.0.1", "fd77::1")
    finally:
        on(cluster, 1, "ip", "route", "del", "blackhole", "10.77.0.1/32")
    assert told == ["", "fd77::2"]


def test_only_addresses_that_lead_out_are_seen(cluster):
    expected = [("eth0", "10.77.0.1", 24), ("eth0", "fd77::1", 64)]
    with addresses_on(cluster, 0, "away", "169.254.7.7/16", "fe80::7/64"):
        on(cluster, 0, "ip", "address", "add", "10.9.9.9/32", "dev", "lo")
        done = cluster.run(cluster.hosts[0], [PYTHON, "-c", SEE])
        on(cluster, 0, "ip", "address", "del", "10.9.9.9/32", "dev", "lo")
    assert done.stdout == f"{expected}\n"
    with addresses_on(cluster, 0, "spare", "10.9.9.9/24"):
        on(cluster, 0, "ip", "link", "set", "spare", "down")
        done = cluster.run(cluster.hosts[0], [PYTHON, "-c", SEE])
    assert done.stdout == f"{expected}\n"


def start_ranks(cluster, meetings, places=PLACES):
    """Start a rank for every list of environments, in which it meets the others."""
    words = [PYTHON, "-m", "tests.cluster.meeting_rank"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        cluster.start(
            cluster.hosts[place],
            [*words, *map(json.dumps, environments)],
            env=WELL_KNOWN,
            **pipes,
        )
        for place, environments in zip(places, meetings, strict=True)
    ]


def results(processes):
    """Return what each process printed, by meetings; none outlives this."""
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        said = []
        for process in processes:
            out, errors = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, errors
            said.append([json.loads(line) for line in out.splitlines()])
    meetings = zip_longest(*said)
    return [[each for each in meeting if each is not None] for meeting in meetings]


def by_hand(address, size=4, **more):
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    return [place | more | {"RANK": str(rank)} for rank in range(size)]


def assert_met(said, network, size=4):
    assert [each.get("total") for each in said] == [size * (size + 1) / 2] * size, said
    for each in said:
        own = [a for a in each["listens"] if a not in ("::", "0.0.0.0")]  # noqa: S104
        assert own, said
        assert all(a.startswith(network) for a in own), said


@contextmanager
def names_that_lead_home(cluster):
    """Every host's own name leads to its loopback, as Debian's installer has it."""
    before = [(host.folder / "hosts").read_text() for host in cluster.hosts]
    for host, text in zip(cluster.hosts, before, strict=True):
        others = [line for line in text.splitlines() if line.split()[1] != host.name]
        lines = [f"127.0.1.1 {host.name}", *others]
        (host.folder / "hosts").write_text("".join(f"{line}\n" for line in lines))
    try:
        yield
    finally:
        for host, text in zip(cluster.hosts, before, strict=True):
            (host.folder / "hosts").write_text(text)


@contextmanager
def second_line(cluster):
    """Join the first two hosts by a line besides the one that leads to all."""
    first, other = cluster.hosts[:2]
    enter = ["nsenter", "--target", str(first.init_pid), "--net", "--"]
    ends = ["type", "veth", "peer", "name", "eth9", "netns", str(other.init_pid)]
    words = [*enter, "ip", "link", "add", "eth9", *ends]
    subprocess.run(words, check=True)
    try:
        for number in range(2):
            address = f"10.78.0.{number + 1}/24"
            on(cluster, number, "ip", "address", "add", address, "dev", "eth9")
            on(cluster, number, "ip", "link", "set", "eth9", "up")
        yield
    finally:
        on(cluster, 0, "ip", "link", "del", "eth9")


def in_step(job, *, nodes="node[1-3]"):
    """Return what ``srun -N3 -n4`` tells its tasks."""
    shared = {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    }
    local = [0, 1, 0, 0]
    return [
        shared
        | {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local[rank]),
            "SLURM_NODEID": str(PLACES[rank]),
        }
        for rank in range(4)
    ]


def test_ranks_meet_where_slurm_or_the_user_has_them_meet(cluster):
    """One meeting after another, since torch takes longer to import than all of them.

    First tasks of a step, beside whoever has their port; three of them then at a name
    that leads home, at an interface that was named, and by IPv6; and one where the
    step's hosts have no address.
    """
    taken = str(step_ports("77.0")[0])
    words = [PYTHON, "-c", BLOCK, "10.77.0.1", taken]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    meetings = [[each] for each in in_step("77")]
    for more in (
        by_hand("node1", size=3),
        by_hand("10.77.0.1", 3, GLOO_SOCKET_IFNAME="eth9", MASTER_PORT=str(PORT + 1)),
        by_hand("fd77::1", 3, MASTER_PORT=str(PORT + 2)),
    ):
        for own, environment in zip(meetings, more, strict=False):
            own.append(environment)
    meetings[0] += in_step("78", nodes="moon[1-3]")[:1]
    with second_line(cluster), names_that_lead_home(cluster):
        blocker = cluster.start(cluster.hosts[0], words, **pipes)
        with blocker:
            assert blocker.stdout.readline() == "listening\n"
            step, *by_user, lost = results(start_ranks(cluster, meetings))
            blocker.stdin.close()
    assert_met(step, "10.77.0.")
    # Nothing but Gloo and the store listens, and neither on all addresses.
    assert all(each["listens"] == [f"10.77.0.{place + 1}"] for each, place in
               zip(step, PLACES, strict=True)), step  # fmt: skip
    for said, network in zip(by_user, ("10.77.0.", "10.78.0.", "fd77::"), strict=True):
        assert_met(said, network, size=3)
    (said,) = lost
    assert "found no route to moon2, a host of the Slurm step." in said["error"]
    assert "Set MASTER_ADDR and MASTER_PORT on all ranks." in said["error"]


def mpirun(cluster, hosts, size, *words):
    """Run ranks of Open MPI's on some hosts, from the first."""
    options = ["--allow-run-as-root", "--prefix", sys.prefix, "--bind-to", "none"]
    agent = ["--prtemca", "plm_ssh_agent", f"ssh -F {cluster.ssh_config}"]
    # Open MPI itself takes a bridge that all hosts have for a way between them.
    network = ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "if_include", "eth0"]
    exported = ["-x", "OMP_NUM_THREADS", "--host", hosts, "-n", str(size)]
    command = [f"{BIN}/mpirun", *options, *agent, *network, *exported, *words]
    return cluster.run(cluster.hosts[0], command, timeout_s=HANG_S, env=WELL_KNOWN)


def test_ranks_of_open_mpi_meet_where_mpi_tells_them(cluster):
    bridge = "172.17.0.1/16"
    with ExitStack() as stack:
        stack.enter_context(names_that_lead_home(cluster))
        for host in range(3):
            stack.enter_context(addresses_on(cluster, host, "docker0", bridge))
        rank = (PYTHON, "-m", "tests.cluster.meeting_rank")
        done = mpirun(cluster, "node1:2,node2:1,node3:1", 4, *rank)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert_met(said, "10.77.0.")
    for host in cluster.hosts:
        left = cluster.run(host, ["ls", "/dev/shm"])  # noqa: S108
        assert left.stdout == ""


@pytest.mark.soak
def test_ranks_of_torchrun_meet_at_its_store(cluster):
    with names_that_lead_home(cluster):
        processes = []
        for node in range(2):
            nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
            master = ["--master-addr", "node1", "--master-port", str(PORT)]
            words = [PYTHON, "-m", "torch.distributed.run", *nodes, *master]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(
                cluster.start(
                    cluster.hosts[node],
                    [*words, "-m", "tests.cluster.meeting_rank"],
                    env=WELL_KNOWN,
                    **pipes,
                )
            )
        (said,) = results(processes)
        assert_met(said, "10.77.0.", size=2)


def test_the_ports_of_a_step_are_below_those_of_outgoing_connections():
    ports = step_ports("1.0")
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < 32768 for port in ports)
    assert step_ports("1.0") == ports
    assert step_ports("1.1") != ports
