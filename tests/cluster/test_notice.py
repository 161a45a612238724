"""``--notice``: ranks leave a host that its cloud is about to take, without a loss."""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.cluster.faults import done_on
from tests.cluster.metadata_server import ADDRESS
from tests.cluster.training import assert_nothing_left
from tests.limits import HANG_S, until

pytestmark = pytest.mark.waits

NUM_STEPS = 400
RANK = str(Path(__file__).with_name("notice_rank.py"))
SERVER = str(Path(__file__).with_name("metadata_server.py"))


@contextmanager
def training(cluster, folder, notice, env=None):
    """Start a training with a rank on each of two hosts; wait until both train.

    With an environment there is notice from the start, so that one may never.
    """
    words = [sys.executable, "-m", "ronde", "run", "--nested"]
    words += ["-H", "node1:1,node2:1", "--min-ranks", "1", "--notice", notice]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--grace", "2s", "--"]
    words += [sys.executable, RANK, str(folder), str(NUM_STEPS)]
    with cluster.start(
        cluster.hosts[0],
        words,
        env={"PATH": os.defpath, "HOME": str(Path.home())} | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            awaited = () if env else ("node1", "node2")
            until(lambda: all(steps(folder, name) for name in awaited))
            yield process
        finally:
            process.kill()


def steps(folder, host):
    """Return number and size of each step that a host's rank has begun."""
    path = folder / f"steps.{host}"
    text = path.read_text() if path.exists() else ""
    return [tuple(map(int, line.split())) for line in text.splitlines()]


def finish(process):
    """Return what a training wrote, which must end well."""
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    return output


def assert_left(folder, output, host, reason):
    """Assert that a host's rank left after a step, and none was done again."""
    line = f"ronde: {host}: {reason}; 2 ranks became 1 and go on from step "
    found = re.findall(
        rf"^{re.escape(line)}(\d+) after [\d.]+m?s\.$", output, re.MULTILINE
    )
    assert len(found) == 1, output
    other = {"node1": "node2", "node2": "node1"}[host]
    left, stayed = steps(folder, host), steps(folder, other)
    num_both = int(found[0])
    numbers = [number for number, _ in stayed]
    assert numbers == list(range(numbers[0], numbers[0] + NUM_STEPS))
    assert [size for _, size in stayed] == [2] * num_both + [1] * (NUM_STEPS - num_both)
    assert left == stayed[:num_both]


@contextmanager
def metadata_server(cluster, host, folder):
    """Have a host be one of a cloud's."""
    add, delete = (
        ["ip", "addr", w, f"{ADDRESS}/32", "dev", "lo"] for w in ("add", "del")
    )
    hosts = host.folder / "hosts"
    before = hosts.read_text()
    with ExitStack() as stack:
        stack.enter_context(done_on(cluster, host, add, delete))
        stack.callback(hosts.write_text, before)
        hosts.write_text(f"{before}{ADDRESS} metadata.google.internal\n")
        server = stack.enter_context(
            cluster.start(
                host, [sys.executable, SERVER, str(folder)], stdout=subprocess.PIPE
            )
        )
        stack.callback(server.kill)
        assert server.stdout.readline() == b"listens\n"
        yield


def test_a_file_on_a_host_has_its_rank_leave(cluster, tmp_path):
    with training(cluster, tmp_path, "file:/run/taken") as process:
        cluster.run(cluster.hosts[1], ["touch", "/run/taken"])
        output = finish(process)
    cluster.run(cluster.hosts[1], ["rm", "/run/taken"])
    assert_left(tmp_path, output, "node2", "/run/taken is there")
    assert_nothing_left(cluster)


@pytest.mark.parametrize(
    ("cloud", "service", "reason"),
    [
        ("aws", "EC2", "AWS takes it at 08:22:00 UTC"),
        pytest.param(
            *("gcp", "Google Cloud", "Google Cloud takes it within 30 s"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("azure", "Azure", "Azure takes it at 18:29:47 UTC (Preempt)"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_cloud_gives_notice_of_one_host(cluster, tmp_path, cloud, service, reason):
    host = cluster.hosts[1]
    with (
        metadata_server(cluster, host, tmp_path),
        training(cluster, tmp_path, f"signal,{cloud}") as process,
    ):
        until((tmp_path / "asked").exists)
        (tmp_path / "taken").touch()
        output = finish(process)
    assert_left(tmp_path, output, "node2", reason)
    text = f"ronde: node1: --notice {cloud}: no {service} metadata service here ("
    assert output.count("--notice") == output.count(text) == 1, output


@pytest.mark.soak
def test_slurm_ends_the_allocation_of_one_host(cluster, tmp_path):
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 50)}
    with training(cluster, tmp_path, "slurm", env) as process:
        output = finish(process)
    at = time.strftime("%H:%M:%S", time.gmtime(int(env["SLURM_JOB_END_TIME"])))
    assert_left(tmp_path, output, "node1", f"Slurm ends its job at {at} UTC")
    text = "ronde: node2: --notice slurm: no SLURM_JOB_END_TIME here (not set)."
    assert output.count(text) == output.count("--notice") == 1


@pytest.mark.soak
def test_a_service_that_does_not_answer_harms_nothing(cluster, tmp_path):
    """Packets to it vanish, so that each try takes its whole time."""
    with ExitStack() as stack:
        for host in cluster.hosts[:2]:
            add, delete = (
                ["ip", "route", w, ADDRESS, "dev", "eth0"] for w in ("add", "del")
            )
            stack.enter_context(done_on(cluster, host, add, delete))
        with training(cluster, tmp_path, "aws,azure,gcp") as process:
            output = finish(process)
    for name, cloud in (("aws", "EC2"), ("azure", "Azure"), ("gcp", "Google Cloud")):
        for host in ("node1", "node2"):
            text = f"ronde: {host}: --notice {name}: no {cloud} metadata service here ("
            assert output.count(text) == 1, output
    assert output.count("--notice") == 6, output
    numbers = [number for number, size in steps(tmp_path, "node2")]
    assert len(numbers) == len(set(numbers)) == NUM_STEPS
    assert "became" not in output
