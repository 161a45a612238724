"""Another user's process against a job, at each stage: it gains and ends nothing."""

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.cluster.machines import Machine
from tests.cluster.slurm import slurm, why_no_slurm
from tests.limits import HANG_S

from ronde.collectives import step_ports

pytestmark = pytest.mark.waits

STRANGER = (Path(__file__).with_name("stranger.py")).read_text()
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
RANK = [sys.executable, "-m", "tests.cluster.guarded_rank"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@dataclass
class Stranger:
    """A process of another user on one host."""

    process: subprocess.Popen
    lines: list[dict] = field(default_factory=list)

    def read(self):
        """Return the next thing it says."""
        line = self.process.stdout.readline()  # it ends by itself in time
        assert line, self.process.stderr.read()
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def wait_for(self, word):
        while word not in (said := self.read()):
            pass
        return said[word]


class Job:
    """A job of guarded ranks, and the strangers that try to get at it.

    Args:
        cluster: The hosts.
        folder: What the ranks and this share.
        num_ranks: Of the job.
    """

    def __init__(self, cluster, folder, num_ranks):
        self.folder = folder
        self.num_ranks = num_ranks
        self._cluster = cluster
        self._closing = ExitStack()
        self._strangers: list[Stranger] = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._closing.__exit__(*error)

    def watch(self, process):
        """Kill the launcher, if nothing better happens."""
        self.process = self._closing.enter_context(process)
        self._closing.callback(process.kill)

    def wait_all(self, word):
        """Wait until each rank has said a word; return what."""
        paths = [self.folder / f"{word}.{rank}" for rank in range(self.num_ranks)]
        ends_at = time.monotonic() + HANG_S
        while not all(path.exists() for path in paths):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_at, f"all ranks must come to {word}"
            time.sleep(0.02)
        return [path.read_text() for path in paths]

    def tell(self, word):
        (self.folder / word).touch()

    def let_in(self, hosts, stage, taken=lambda _: ()) -> list[Stranger]:
        """Start a stranger on each host, and wait until all have tried all."""
        strangers = [self._start(host, stage, taken(host)) for host in hosts]
        for stranger in strangers:
            stranger.wait_for("ready")
            assert stranger.lines[-1]["user"] == NOBODY
        return strangers

    def _start(self, host: Machine, stage, taken) -> Stranger:
        """Start one; it is told what others must find out: where the ranks listen."""
        found = self._cluster.listening(host)
        # mpirun and srun listen too, and are easily put out of step: not our affair.
        of_ranks = [s for s in found if list(s.words[1:3]) == RANK[1:]]
        places = [[s.address, s.port] for s in of_ranks]
        order = json.dumps([stage, taken, places])
        words = [*AS_NOBODY, sys.executable, "-c", STRANGER, order]
        process = self._cluster.start(host, words, stdin=subprocess.PIPE, **PIPES)
        self._closing.enter_context(process)
        self._closing.callback(process.kill)
        stranger = Stranger(process)
        self._strangers.append(stranger)
        return stranger

    def assert_unharmed(self):
        """The job has ended well, and no stranger has gained a thing."""
        self.tell("leave")
        output, errors = self.process.communicate(timeout=HANG_S)
        for stranger in self._strangers:
            stranger.process.stdin.close()
            stranger.process.stdin = None
        gained = [stranger.wait_for("gained") for stranger in self._strangers]
        assert gained == [[]] * len(gained)
        assert self.process.returncode == 0, output + errors


def run_beside_strangers(job, hosts, before):
    """Take a job from stage to stage, with strangers on all its hosts at each.

    Args:
        job: Its ranks start.
        hosts: Where.
        before: Given what the first rank was told: what strangers take on each host
            before the ranks meet, as ports.
    """
    told = json.loads(job.wait_all("started")[0])
    ports = [int(port) for port in before(told)]
    first, *_ = job.let_in(
        hosts,
        "before",
        lambda host: [[told["MASTER_ADDR"] or host.address, p] for p in ports],
    )
    job.tell("go")
    if told["SLURM_JOB_ID"]:
        # Rank 0 comes late: the others have found the stranger by then.
        first.wait_for("visited")
    job.tell("go.0")
    job.wait_all("ready")
    job.let_in(hosts, "during")
    job.tell("stop")
    assert job.wait_all("done") == ["right"] * job.num_ranks
    job.let_in(hosts, "after")
    job.assert_unharmed()


def environment():
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return {"PATH": path, "HOME": "/root", "OMP_NUM_THREADS": "1"}


def master_port(told):
    return [told["MASTER_PORT"]] if told["MASTER_PORT"] else []


@pytest.mark.parametrize(
    "how",
    [
        "ronde",
        *(pytest.param(h, marks=pytest.mark.soak) for h in ("ronde-gloo", "mpirun")),
    ],
)
def test_on_one_host(cluster, tmp_path, how):
    words = [sys.executable, "-m", "ronde", "run", "-n", "2", "--"]
    if how == "mpirun":
        mpirun = str(Path(sys.executable).parent / "mpirun")
        words = [mpirun, "--allow-run-as-root", "--bind-to", "none", "-n", "2"]
    env = environment() | ({"RONDE_ENGINE": "gloo"} if "gloo" in how else {})
    host = cluster.hosts[0]
    with Job(cluster, tmp_path, 2) as job:
        words = [*words, *RANK, str(tmp_path)]
        job.watch(cluster.start(host, words, env=env, **PIPES))
        run_beside_strangers(job, [host], master_port)


def test_on_three_hosts(cluster, tmp_path):
    words = [sys.executable, "-m", "ronde", "run", "-H", "node1:2,node2:1,node3:1"]
    words += ["--ssh-args", f"-F {cluster.ssh_config}", "--", *RANK, str(tmp_path)]
    with Job(cluster, tmp_path, 4) as job:
        head = cluster.hosts[0]
        job.watch(cluster.start(head, words, env=environment(), **PIPES))
        run_beside_strangers(job, cluster.hosts, master_port)


@pytest.fixture(scope="module")
def batch(three_hosts):
    if reason := why_no_slurm():
        pytest.skip(reason)
    with slurm(three_hosts) as running:
        yield running


@pytest.mark.soak
def test_under_slurm(cluster, batch, tmp_path):
    """The strangers know the ports: they follow from numbers that everybody sees."""
    with Job(cluster, tmp_path, 3) as job:
        words = ["srun", "-N3", "-n3", "--kill-on-bad-exit=1"]
        env = environment() | {"XDG_CONFIG_HOME": str(tmp_path)}
        env["PATH"] += f":{batch.environment['PATH']}"
        job.watch(batch.start([*words, *RANK, str(tmp_path)], env=env, **PIPES))

        def taken(told):
            return step_ports(f"{told['SLURM_JOB_ID']}.{told['SLURM_STEP_ID']}")[:6]

        run_beside_strangers(job, cluster.hosts, taken)
    assert (tmp_path / "ronde" / "secret").exists()
