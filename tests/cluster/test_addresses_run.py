"""Where ``ronde run`` lets the ranks of several hosts meet."""

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

TELL = 'echo "$RONDE_HOST $MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"'


def run(cluster, *words, at=0):
    """Run ``ronde run`` on a host."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    command = [sys.executable, "-m", "ronde", "run", "--no-prefix"]
    command += ["--ssh-args", f"-F {cluster.ssh_config}", *words]
    return cluster.run(cluster.hosts[at], command, timeout_s=HANG_S, env=env)


def told(cluster, *words):
    """Return where the ranks of a job were told to meet."""
    done = run(cluster, *words, "--", "sh", "-c", TELL)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@contextmanager
def changed(cluster, host, change, back):
    """Have ``ip`` change something on a host."""
    machine = cluster.hosts[host]
    done = cluster.run(machine, ["ip", *change.split()])
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        cluster.run(machine, ["ip", *back.split()])


def with_link(cluster, stack, host, name, *addresses):
    stack.enter_context(
        changed(cluster, host, f"link add {name} type bridge", f"link del {name}")
    )
    for address in addresses:
        change = f"address add {address} dev {name}"
        stack.enter_context(changed(cluster, host, change, "link show"))
    up = f"link set {name} up"
    stack.enter_context(changed(cluster, host, up, "link show"))


def test_a_bridge_that_every_host_has_is_not_used(cluster):
    with ExitStack() as stack:
        for host in range(3):
            with_link(cluster, stack, host, "docker0", "172.17.0.1/16")
        lines = told(cluster, "-H", "node1:1,node2:1,node3:1")
    assert lines == [f"node{i} 10.77.0.1 eth0 =eth0" for i in (1, 2, 3)]


def test_ipv6_is_used_if_a_host_has_no_ipv4(cluster):
    with changed(
        cluster,
        1,
        "address del 10.77.0.2/24 dev eth0",
        "address add 10.77.0.2/24 dev eth0",
    ):
        lines = told(cluster, "-H", "node1:1,node2:1")
    assert lines == [f"node{i} fd77::1 eth0 =eth0" for i in (1, 2)]


def test_interface_variables_of_the_user_are_kept(cluster):
    user = ["-x", "GLOO_SOCKET_IFNAME=lo", "-x", "NCCL_SOCKET_IFNAME=^docker"]
    lines = told(cluster, "-H", "node1:1,node2:1", *user)
    assert lines == [f"node{i} 10.77.0.1 lo ^docker" for i in (1, 2)]


def test_an_interface_that_not_every_host_has_is_refused(cluster):
    hosts = "node1:1,node2:1,node3:1"
    with ExitStack() as stack:
        with_link(cluster, stack, 0, "ib0", "10.5.0.1/24")
        done = run(cluster, "-H", hosts, "--interface", "ib0", "--", "true")
    assert done.returncode == 64, done.stderr
    assert "got ib0, which node2, node3 lacks. node2 has 10.77.0.2" in done.stderr


def test_a_host_that_gets_no_answer_is_named_and_nothing_starts(cluster, tmp_path):
    """What the first host sends to the third vanishes, as behind a firewall."""
    with ExitStack() as stack:
        for bits, address in ((32, "10.77.0.3"), (128, "fd77::3")):
            route = f"route add blackhole {address}/{bits}"
            back = route.replace("add", "del")
            stack.enter_context(changed(cluster, 0, route, back))
        words = ["-H", "node1:1,node2:1,node3:1", "--", "touch", str(tmp_path / "ran")]
        done = run(cluster, *words, at=1)
    assert done.returncode == 69, (done.returncode, done.stderr)
    assert "node1 does not answer node3 at 10.77.0.1 port" in done.stderr
    assert not (tmp_path / "ran").exists()
