"""Start jobs on three hosts, break them, and count wrong ends.

The hosts are namespaces, each with its own sshd and a link of 1 Gbit/s. For each fault,
drawn at random: whether the exit code and the summary were right, how long the end took
from then on (it may take the grace and 10 s), which processes were left on any host,
and which files. The last line is JSON. Exits with 1 if anything was wrong. Needs root.

    python -m tests.soak.cluster_faults --runs 300 --seed 1

With ``--quick`` hosts are missed sooner, and stalls are shorter.
"""

import argparse
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines import Cluster, ClusterError, HostProcess, Machine, machines
from tests.cluster.observation import Process
from tests.soak.figures import reset_signals, show
from tests.soak.launch_faults import Tally
from tests.timed import LEASE_S, impatient_ronde

from ronde.launch import Timeouts

ROOT = Path(__file__).parents[2]
GRACE_S = 2.0
LIMIT_S = GRACE_S + 10.0
_PER_HOST = 2
_START_S = 60.0
_POLL_S = 0.01
_RANK = str(Path(__file__).with_name("cluster_rank.py"))
_FULL = "/tmp/full"  # noqa: S108  each host has its own
_DISK = "/tmp/disk"  # noqa: S108
_OUTAGE = (0.5, 0.875)
"""Of a lease."""
_SLOW = "1mbit"
_RARE = 0.3


@dataclass(slots=True)
class Running:
    """A job with all ranks ready."""

    cluster: Cluster
    launcher: HostProcess  # ``ronde run``, on the first host
    lease_s: float
    victim: int  # the rank that breaks
    host: Machine  # of that rank

    def rank_processes(self, host: Machine) -> list[Process]:
        """Return the ranks' own processes on a host."""
        # The launcher has the same words, but not there.
        processes = self.cluster.processes(host)
        return [p for p in processes if p.words[3:4] == (_RANK,)]

    def agent(self) -> int:
        """Return the process number of the victim's agent."""
        ranks = self.rank_processes(self.host)
        # A rank's own child looks like it until it runs another program.
        parents = {p.parent for p in ranks} - {p.pid for p in ranks}
        (agent,) = parents
        return agent

    def keeper(self) -> int:
        """Return the process number of that agent's keeper."""
        agent = self.agent()
        processes = self.cluster.processes(self.host)
        return next(p.parent for p in processes if p.pid == agent)


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to end a job."""

    name: str
    act: Callable[[Running], None]  # when all ranks are ready
    exit_codes: tuple[int, ...]  # allowed
    says: str  # pattern in the launcher's stderr; ``{rank}``, ``{host}``: the victim's
    habit: str = "plain"  # of all ranks: see ``cluster_rank.py``
    deed: str = "exit"  # of the victim
    where: tuple[int, ...] = (0, 1, 2)  # indices of hosts for the victim
    options: tuple[str, ...] = ()  # of ``ronde run``
    weight: float = 1.0  # how often it is drawn; less if it takes 10 s


def _trigger(running: Running) -> None:
    running.launcher.send_signal(signal.SIGUSR1)


def _sends(number: int) -> Callable[[Running], None]:
    return lambda running: running.launcher.send_signal(number)


def _cut(running: Running) -> None:
    running.cluster.cut(running.host)


def _freeze_disk(running: Running) -> None:
    """Let no write to the log files end for a while; then break a rank."""
    head = running.cluster.hosts[0]
    running.cluster.run(head, ["fsfreeze", "-f", _DISK])
    time.sleep(running.lease_s + 1.0)
    running.cluster.run(head, ["fsfreeze", "-u", _DISK])
    _trigger(running)


def _read_nothing(running: Running) -> None:
    """Read nothing of the job's output for a while; then break a rank."""
    time.sleep(running.lease_s + 1.0)
    _trigger(running)


def _interrupt_line(running: Running) -> None:
    """Cut a line, but not for long; then break a rank."""
    running.cluster.cut(running.host)
    time.sleep(running.lease_s * random.uniform(*_OUTAGE))
    running.cluster.restore(running.host)
    _trigger(running)


def _fill_line(running: Running) -> None:
    """Have a slow line filled with output; then break a rank."""
    running.cluster.slow_down(running.host, _SLOW)
    ends_at = time.monotonic() + 2.0
    while (left_s := ends_at - time.monotonic()) > 0:
        if select.select([running.launcher.stdout], [], [], left_s)[0]:
            os.read(running.launcher.stdout.fileno(), 65536)
    _trigger(running)


def _kill_sshd(running: Running) -> None:
    running.cluster.kill_sshd(running.host)


_LOST = r"{host} was lost first"
_FAILED = r"rank {rank} failed first, .*: "

FAULTS = (
    Fault("rank exits 3", _trigger, (3,), _FAILED + "exit code 3"),
    Fault(
        "rank raises", _trigger, (1,), "(?s)Traceback.*ValueError: the data is no data",
        deed="raise",
    ),
    Fault(
        "rank is killed", _trigger, (137,), _FAILED + "killed by SIGKILL", deed="kill"
    ),
    Fault(
        "rank crashes", _trigger, (139,), _FAILED + "killed by SIGSEGV", deed="crash"
    ),
    Fault(
        "rank exits, the others hang in SIGTERM", _trigger, (3,), _FAILED,
        habit="stubborn",
    ),
    Fault(
        "rank exits, children in own sessions", _trigger, (3,), _FAILED, habit="parent"
    ),
    Fault(
        "agent killed",
        lambda running: os.kill(running.agent(), signal.SIGKILL),
        (70,), _LOST, habit="parent",
    ),
    Fault(
        "keeper killed",
        lambda running: os.kill(running.keeper(), signal.SIGKILL),
        (69, 70), _LOST, habit="parent",
    ),
    Fault(
        "controller killed", _sends(signal.SIGKILL), (-signal.SIGKILL,), "",
        habit="parent",
    ),
    Fault("Ctrl-C", _sends(signal.SIGINT), (130,), "SIGINT", habit="parent"),
    Fault("link cut", _cut, (69,), _LOST, habit="parent", where=(1, 2),
          weight=_RARE),
    Fault(
        "head's link cut", _cut, (69,), r"node[23] was lost first", habit="parent",
        where=(0,), weight=_RARE,
    ),
    Fault("sshd killed", _kill_sshd, (69,), _LOST, habit="parent", where=(1, 2)),
    Fault(
        "disk full under --log-dir, a rank writes",
        _trigger, (0, 143), "(?i)no space left", deed="write",
        options=("--log-dir", _FULL),
    ),
    Fault(
        "disk full under --log-dir, a rank is killed",
        _trigger, (137,), _FAILED + "killed by SIGKILL", deed="kill",
        options=("--log-dir", _FULL),
    ),
    Fault(
        "rank exits 0.5 s after its peers", _trigger, (1,),
        r"(?s)rank {rank} failed first.*ValueError: the data is no data",
        habit="dependent", deed="raise slowly",
    ),
    Fault(
        "log files stall for long, a rank is killed", _freeze_disk, (137,),
        _FAILED + "killed by SIGKILL", habit="noisy", deed="kill",
        options=("--log-dir", _DISK), weight=_RARE,
    ),
    Fault(
        "output is not read for long, a rank exits 3", _read_nothing, (3,),
        _FAILED + "exit code 3", habit="noisy", weight=_RARE,
    ),
    Fault(
        "link cut for a while, a rank exits 3", _interrupt_line, (3,),
        _FAILED + "exit code 3", weight=_RARE,
    ),
    Fault(
        "link of 1 Mbit/s full of output, a rank exits 3", _fill_line, (3,),
        _FAILED + "exit code 3", habit="noisy", where=(1, 2), weight=_RARE,
    ),
)  # fmt: skip


def main() -> int:
    reset_signals()
    parser = argparse.ArgumentParser(description="Break jobs on three hosts.")
    parser.add_argument("--runs", type=int, default=45)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="NAME", help="this fault only")
    parser.add_argument("--quick", action="store_true", help="miss hosts sooner")
    options = parser.parse_args()
    faults = [f for f in FAULTS if options.only in (None, f.name)]
    if not faults:
        parser.error(f"--only must be one of {[f.name for f in FAULTS]}")
    chance = random.Random(options.seed)
    weights = [fault.weight for fault in faults]
    tallies: dict[str, Tally] = {}
    try:
        with machines(3) as cluster:
            for number in range(options.runs):
                # All of them first, then at random.
                is_first = len(tallies) < len(faults)
                left = [f for f in faults if f.name not in tallies]
                fault = left[0] if is_first else chance.choices(faults, weights)[0]
                tally = tallies.setdefault(fault.name, Tally())
                run_once(cluster, fault, tally, chance, is_quick=options.quick)
                if sys.stderr.isatty():
                    print(f"\r{number + 1}/{options.runs}", end="", file=sys.stderr)
    except ClusterError as error:
        print(f"cluster_faults: {error}", file=sys.stderr)
        return 2
    seconds = {name: tally.seconds for name, tally in tallies.items()}
    wrong = {name: tally.wrong for name, tally in tallies.items()}
    return 0 if show("cluster_faults", seconds, wrong, grace_s=GRACE_S) else 1


def run_once(
    cluster: Cluster,
    fault: Fault,
    tally: Tally,
    chance: random.Random,
    *,
    is_quick: bool,
) -> None:
    """Run one job, break it, and record its end."""
    where = chance.choice(fault.where)
    victim = where * _PER_HOST + chance.randrange(_PER_HOST)
    disk = fault.options[1] if "--log-dir" in fault.options else ""
    if disk:
        mount(cluster, disk)
    before = {host.name: survey(cluster, host) for host in cluster.hosts}
    launcher = start(cluster, fault, victim, is_quick=is_quick)
    lease_s = LEASE_S if is_quick else Timeouts().lease_s
    try:
        said = await_ready(launcher, len(cluster.hosts) * _PER_HOST)
        host = cluster.hosts[where]
        fault.act(Running(cluster, launcher, lease_s, victim, host))
        begun = time.monotonic()
        errors = await_end(launcher)
        wrong = judge(fault, launcher.returncode, errors, victim, where)
        left = await_no_processes(cluster, before, begun)
        tally.seconds.append(time.monotonic() - begun)
    except TimeoutError as error:
        said = b""
        wrong, left = [str(error)], []
    finally:
        launcher.kill()
        launcher.wait()
    if tally.seconds and tally.seconds[-1] > LIMIT_S:
        wrong.append(f"took {tally.seconds[-1]:.1f} s")
    wrong += left + compare_files(cluster, before)
    tally.wrong += [f"{text} ({victim=})" for text in wrong]
    if wrong:
        print(fault.name, wrong, said, file=sys.stderr, flush=True)
    if disk:
        cluster.run(cluster.hosts[0], ["sh", "-ec", f"umount {disk} && rmdir {disk}"])
    cluster.slow_down(cluster.hosts[where], cluster.rate)
    cluster.heal()
    end_sessions(cluster, before)


def mount(cluster: Cluster, folder: str) -> None:
    """Make a file system on the first host: a full one, or one that can stall.

    Raises:
        ClusterError: It cannot be made.
    """
    words = "-t tmpfs -o size=64k tmpfs"
    if folder == _DISK:
        image = str(cluster.folder / "image")
        making = f"truncate -s 32M {image} && mkfs.ext4 -q -F {image}"
        subprocess.run(["/bin/sh", "-ec", making], check=True)
        words = f"-o loop {image}"
    script = f"mkdir -p {folder} && mount -n {words} {folder}"
    done = cluster.run(cluster.hosts[0], ["sh", "-ec", script])
    if done.returncode:
        raise ClusterError(f"{folder} must be mounted, got: {done.stderr}")


def start(
    cluster: Cluster, fault: Fault, victim: int, *, is_quick: bool
) -> HostProcess:
    """Start a job of two ranks on each host."""
    hosts = ",".join(f"{host.name}:{_PER_HOST}" for host in cluster.hosts)
    command = [
        *(impatient_ronde() if is_quick else (sys.executable, "-m", "ronde")),
        *("run", "--nested"),
        *("--grace", f"{GRACE_S:g}s", "--ssh-args", f"-F {cluster.ssh_config}"),
        *("-H", hosts, *fault.options, "--"),
        *(sys.executable, "-I", "-S", _RANK, fault.habit, fault.deed, str(victim)),
    ]
    return cluster.start(
        cluster.hosts[0],
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def await_ready(launcher: HostProcess, num_ranks: int) -> bytes:
    """Wait until all ranks are ready, or raise TimeoutError."""
    said = b""
    ends_at = time.monotonic() + _START_S
    while said.count(b"ready\n") < num_ranks:
        left_s = ends_at - time.monotonic()
        is_ready = select.select([launcher.stdout], [], [], max(0.0, left_s))[0]
        data = os.read(launcher.stdout.fileno(), 65536) if is_ready else b""
        if not data:
            launcher.kill()
            errors = launcher.communicate()[1]
            raise TimeoutError(f"not ready: {said!r} {errors!r}")
        said += data
    return said


def await_end(launcher: HostProcess) -> str:
    """Wait for the launcher's end; return its standard error."""
    try:
        return launcher.communicate(timeout=LIMIT_S + 20)[1].decode()
    except subprocess.TimeoutExpired:
        launcher.kill()
        raise TimeoutError(f"no end: {launcher.communicate()[1]!r}") from None


def judge(fault: Fault, code: int, errors: str, victim: int, where: int) -> list[str]:
    """Return the faults of a job's end."""
    wrong: list[str] = []
    # nsenter ends with 128 and more where what it started was killed.
    codes = {*fault.exit_codes, *(128 - c for c in fault.exit_codes if c < 0)}
    if code not in codes:
        wrong.append(f"exit code {code}: {errors}")
    pattern = fault.says.format(rank=victim, host=f"node{where + 1}")
    if not re.search(pattern, errors):
        wrong.append(f"summary lacks {pattern!r}: {errors}")
    return wrong


def survey(cluster: Cluster, host: Machine) -> tuple[set[int], set[str]]:
    """Return the processes of a host, and the files in its temporary folders."""
    listed = cluster.run(host, ["find", "/tmp", "/dev/shm", "/run"])  # noqa: S108
    files = {
        line
        for line in listed.stdout.splitlines()
        # A checkout that lies there, too, has caches of what runs beside.
        if not line.startswith((_FULL, _DISK, str(ROOT)))
    }
    return {process.pid for process in cluster.processes(host)}, files


def strangers(cluster: Cluster, host: Machine, known: set[int]) -> list[Process]:
    """Return the new processes of a host, without sessions of its sshd.

    A session whose connection was cut lives until TCP gives it up. What it had
    started is another matter.
    """
    return [
        process
        for process in cluster.processes(host)
        if process.pid not in known and process.name != "sshd" and process.state != "Z"
    ]


def await_no_processes(
    cluster: Cluster, before: dict[str, tuple[set[int], set[str]]], begun_s: float
) -> list[str]:
    """Wait until no process of the job is left on any host; return those that stay."""
    while True:
        left = [
            f"left on {host.name}: {process.name} {' '.join(process.words)[:80]}"
            for host in cluster.hosts
            for process in strangers(cluster, host, before[host.name][0])
        ]
        if not left or time.monotonic() > begun_s + LIMIT_S:
            return left
        time.sleep(_POLL_S)


def compare_files(
    cluster: Cluster, before: dict[str, tuple[set[int], set[str]]]
) -> list[str]:
    """Return the files that are on a host and were not."""
    return [
        f"file on {host.name}: {path}"
        for host in cluster.hosts
        for path in sorted(survey(cluster, host)[1] - before[host.name][1])
    ]


def end_sessions(
    cluster: Cluster, before: dict[str, tuple[set[int], set[str]]]
) -> None:
    """End sessions of an sshd after the other side was cut off."""
    for host in cluster.hosts:
        for process in cluster.processes(host):
            is_session = process.name == "sshd" and "[listener]" not in " ".join(
                process.words
            )
            if is_session and process.pid not in before[host.name][0]:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
