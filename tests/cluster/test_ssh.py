"""Agents over real ssh: what goes in the way of one, and what is said of it."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.training import assert_nothing_left
from tests.limits import HANG_S

pytestmark = pytest.mark.waits

ABSENT = "10.77.0.77"
STARTED = Path("/tmp/started")  # noqa: S108 - each host has a /tmp of its own
UNREACHABLE = 69


@pytest.fixture
def run(cluster):
    """Return ``run(*words)``: ``ronde run`` on node1, to its end."""

    def run(*words, config=None, env=None):
        program = [sys.executable, "-m", "ronde", "run"]
        ssh_args = ["--ssh-args", f"-F {config or cluster.ssh_config}"]
        return cluster.run(
            cluster.hosts[0],
            [*program, *ssh_args, *words],
            env=login_environment() | (env or {}),
            timeout_s=HANG_S,
        )

    return run


def login_environment():
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())}


def config_with(cluster, folder, hosts):
    """Write a configuration that has lines of its own for some hosts."""
    own = "".join(
        f"Host {name}\n" + "".join(f"    {line}\n" for line in lines)
        for name, lines in hosts.items()
    )
    path = folder / "config"
    path.write_text(own + cluster.ssh_config.read_text())
    return path


def make_key(path):
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True, timeout=HANG_S)
    return path


def row_of(done, host):
    """Return the line of the table on one host, its spaces made single."""
    lines = [" ".join(line.split()) for line in done.stderr.splitlines()]
    return next(line for line in lines if line.startswith(f"ronde: {host} "))


def restart_sshd(cluster, host, *options):
    cluster.kill_sshd(host)
    cluster.start_sshd(host, *(word for option in options for word in ("-o", option)))


@pytest.fixture(scope="module")
def refusals(three_hosts, tmp_path_factory):
    """Return a run whose hosts are refused for many reasons, all but node3."""
    folder = tmp_path_factory.mktemp("refusals")
    other = make_key(folder / "other_key").with_suffix(".pub").read_text()
    changed = folder / "changed"
    changed.write_text(f"altered {other}")
    there = "HostName node2"
    config = config_with(
        three_hosts,
        folder,
        {
            "keyless": (there, f"IdentityFile {folder}/other_key"),
            "stranger": (
                *(there, "StrictHostKeyChecking ask", "HostKeyAlias stranger"),
                f"UserKnownHostsFile {folder}/known",
            ),
            "strict": (there, "HostKeyAlias strict"),
            "altered": (
                *(there, "HostKeyAlias altered"),
                f"UserKnownHostsFile {changed}",
            ),
            "closed": (there, "Port 2"),
            "absent": (f"HostName {ABSENT}",),
        },
    )
    # The first Host line wins, but IdentityFile adds up: the cluster's key goes.
    text = config.read_text()
    config.write_text(
        text.replace("Host *\n", "Host * !keyless\n", 1)
        + f"Host *\n    UserKnownHostsFile {three_hosts.folder}/known_hosts\n"
        "    IdentitiesOnly yes\n    IdentityAgent none\n"
    )
    names = ("keyless", "stranger", "strict", "altered", "closed", "absent", "nowhere")
    hosts = ",".join(f"{name}:1" for name in (*names, "node3"))
    words = ["--ssh-args", f"-F {config}", "-H", hosts, "touch", str(STARTED)]
    # No name server is asked: none would answer here, which is told otherwise.
    names = folder / "nsswitch.conf"
    names.write_text("hosts: files\n")
    script = 'mount --bind "$1" /etc/nsswitch.conf; shift; exec "$@"'
    alone = ["unshare", "--mount", "sh", "-ec", script, "sh", str(names)]
    done = three_hosts.run(
        three_hosts.hosts[0],
        [*alone, sys.executable, "-m", "ronde", "run", *words],
        env=login_environment(),
        timeout_s=HANG_S,
    )
    assert not (folder / "known").exists()  # the question was not answered with yes
    return done


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("keyless", "key refused ssh-copy-id keyless"),
        ("stranger", "host key unknown ssh stranger once, to see it and accept it"),
        ("strict", "host key unknown ssh strict once, to see it and accept it"),
        ("altered", "host key changed"),
        ("closed", "nothing answers on its ssh port ssh closed"),
        ("absent", "not reached see whether it is up: ssh absent"),
        ("nowhere", "unknown name check the spelling"),
    ],
)
def test_the_table_says_why_a_host_cannot_start(refusals, host, told):
    assert row_of(refusals, host).startswith(f"ronde: {host} {told}")


def test_one_refused_host_is_enough_for_nothing_to_start(refusals, three_hosts):
    assert refusals.returncode == UNREACHABLE
    assert "7 of 8 hosts cannot be used" in refusals.stderr
    assert "node3" not in refusals.stdout
    looked = three_hosts.run(three_hosts.hosts[2], ["test", "-e", str(STARTED)])
    assert looked.returncode == 1
    assert_nothing_left(three_hosts)


def test_logins_that_make_noise_or_are_configured_for_users_work(
    cluster, run, tmp_path
):
    host = cluster.hosts[1]
    banner = tmp_path / "banner"
    banner.write_text("Permission denied to all but the good.\n" * 40)
    noisy = tmp_path / "noisy"
    noisy.write_text(
        "#!/bin/sh\nhead -c 200000 /dev/urandom\nprintf '{\"python\": no newline'\n"
        'echo "welcome to the machine" >&2\neval "$SSH_ORIGINAL_COMMAND"\n'
    )
    noisy.chmod(0o755)
    restart_sshd(cluster, host, f"Banner={banner}", f"ForceCommand={noisy}")
    lines = (
        "RequestTTY force",
        "RemoteCommand echo hello; exec bash -l",
        "ForwardX11 yes",
        "ForwardAgent yes",
        "LocalForward 10.77.0.1:7777 localhost:22",
        "ControlMaster auto",
        "ControlPersist yes",
        f"ControlPath {tmp_path}/s-%h",
    )
    config = config_with(cluster, tmp_path, {"node3": lines})
    done = run("-H", "node1:1,node2:1,node3:1", "hostname", config=config)
    cluster.kill_sshd(host)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[node{number}:{number - 1}] node{number}" for number in (1, 2, 3)
    ]


@pytest.fixture
def own_ronde(cluster):
    """Return a copy of ronde that node1 alone sees, and remove it."""
    folder = Path("/tmp/own ronde")  # noqa: S108 - each host has a /tmp of its own
    host = cluster.hosts[0]
    script = 'mkdir -p "$1" && cp -r src/ronde "$1"'
    copied = cluster.run(host, ["sh", "-c", script, "sh", str(folder)])
    assert copied.returncode == 0, copied.stderr
    yield folder
    cluster.run(host, ["rm", "-r", str(folder)])


def bare_python():
    """Return a Python that finds no ronde by itself."""
    path = str(Path(sys.base_prefix, "bin", "python3"))
    words = [path, "-E", "-c", "import ronde"]
    tried = subprocess.run(words, capture_output=True, timeout=HANG_S, check=False)
    if tried.returncode == 0:
        pytest.skip(f"ronde is installed for {path} itself")
    return path


def test_a_host_without_ronde_is_told_how_to_install_it(run, own_ronde):
    python = bare_python()
    env = {"PYTHONPATH": str(own_ronde)}
    done = run("-H", "node1:1,root@node2:1", "--python", python, "true", env=env)
    assert done.returncode == UNREACHABLE
    assert f"ronde is missing for {python}" in row_of(done, "node2")
    cure = f"tar -C '{own_ronde}' -cz ronde | ssh root@node2 'tar -xz -C"
    assert cure in row_of(done, "node2")


def test_a_server_that_takes_no_more_connections_is_asked_again(cluster, run):
    host = cluster.hosts[1]
    config = host.folder / "sshd_config"
    text = config.read_text()
    config.write_text(text.replace("MaxStartups 100", "MaxStartups 1:100:1"))
    restart_sshd(cluster, host, "LogLevel=VERBOSE")
    config.write_text(text)
    holder = (
        "import os, socket; s = socket.create_connection(('node2', 22)); "
        "s.recv(1); os.write(1, b'held'); os.read(0, 1)"
    )
    with cluster.start(
        cluster.hosts[0],
        [sys.executable, "-c", holder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as held:
        assert select.select([held.stdout], [], [], HANG_S)[0]
        assert os.read(held.stdout.fileno(), 4) == b"held"
        program = [sys.executable, "-m", "ronde", "run", "-H", "node2:1"]
        words = [*program, "--ssh-args", f"-F {cluster.ssh_config}", "hostname"]
        with cluster.start(
            cluster.hosts[0],
            words,
            env=login_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            try:
                await_line(host.folder / "sshd.log", "drop connection", job)
                held.communicate(b".", timeout=HANG_S)
                out, errors = job.communicate(timeout=HANG_S)
            finally:
                job.kill()
                held.kill()
    cluster.kill_sshd(host)
    assert (job.returncode, out) == (0, "[0] node2\n"), errors


def await_line(path, words, job):
    """Wait until a file has these words, or a job has ended that should bring them."""
    with subprocess.Popen(
        ["/usr/bin/tail", "-n", "+1", "-F", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as tail:
        seen = b""
        while words.encode() not in seen:
            ready = select.select([tail.stdout], [], [], HANG_S)[0]
            assert ready, seen
            seen += os.read(tail.stdout.fileno(), 65536)
            assert job.poll() is None, seen
        tail.terminate()


def test_user_and_port_of_a_host_count_and_addresses_do(cluster, run, tmp_path):
    host = cluster.hosts[1]
    restart_sshd(cluster, host, "Port=2222")
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{host.address} slots=1 user=root port=2222\n")
    key = cluster.folder / "known_hosts"
    line = next(
        line for line in key.read_text().splitlines() if line.startswith("node2,")
    )
    known = tmp_path / "known"
    known.write_text(f"[{host.address}]:2222 {line.split(maxsplit=1)[1]}\n")
    config = config_with(
        cluster, tmp_path, {host.address: (f"UserKnownHostsFile {known}",)}
    )
    done = run("--hostfile", str(hostfile), "hostname", config=config)
    cluster.kill_sshd(host)
    assert (done.returncode, done.stdout) == (0, "[0] node2\n"), done.stderr
    six = run("-H", f"[{cluster.hosts[2].address6}]:1", "hostname")
    assert (six.returncode, six.stdout) == (0, "[0] node3\n"), six.stderr


def test_timeout_shows_where_the_ranks_of_all_hosts_are(run, cluster, tmp_path):
    program = tmp_path / "hang.py"
    program.write_text("import time\ndef nap():\n    time.sleep(1000)\nnap()\n")
    words = ("-H", "node1:1,node2:2", "--timeout", "4s", "--grace", "1s")
    done = run(*words, sys.executable, str(program))
    assert done.returncode == 124, done.stderr
    assert "| ranks 0-2 on node1, node2 (python" in done.stderr
    assert f'File "{program}", line 3 in nap' in done.stderr
    assert "ronde: --timeout ended the job, exit code 124\n" in done.stderr
    assert_nothing_left(cluster)


def test_many_unknown_names_take_as_long_as_one(cluster, tmp_path):
    """One after the other they would take longer than anything may here."""
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\n")
    script = 'mount --bind "$1" /etc/resolv.conf; shift; exec "$@"'
    alone = ["unshare", "--mount", "sh", "-ec", script, "sh", str(resolv)]
    ssh_args = ["--ssh-args", f"-F {cluster.ssh_config}"]
    words = [sys.executable, "-m", "ronde", "run", "--dry-run", *ssh_args]
    serving = [sys.executable, str(Path(__file__).with_name("answering.py")), "1000"]
    with cluster.start(cluster.hosts[0], serving, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"up\n"
        done = cluster.run(
            cluster.hosts[0],
            [*alone, *words, "-H", "absent[1-100]:1", "true"],
            env=login_environment(),
            timeout_s=HANG_S,
        )
        server.kill()
    assert done.returncode == UNREACHABLE
    assert "100 of 100 hosts cannot be used" in done.stderr
    assert "unknown name" in done.stderr
    assert_nothing_left(cluster)
