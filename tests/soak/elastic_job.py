"""An elastic job on three hosts, its visible state, and ways to break it.

Note [The spared rank]
    One rank that has the state must live, or the job could not go on: one that has
    applied a step in the newest view, on a healthy host.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.machines import Cluster, ClusterError, HostProcess, Machine
from tests.cluster.observation import Process
from tests.soak.elastic_proof import Mark, parse_mark

PER_HOST = 2
CUT_S = (6.5, 10.0)  # longer than a lease
FLAP_S = 3.0
_SIGNALS = (signal.SIGKILL,) * 6 + (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGINT),
)
_IN_VIEW = 0.8
_DROP = (
    "add table inet planted; add chain inet planted way {{ type filter hook {way} "
    "priority 0; }}; add rule inet planted way meta iifname != lo drop"
)


class ImpossibleError(Exception):
    """This fault would leave no rank, or has no target."""


@dataclass(slots=True)
class Fault:
    """A fault, or a host that was added or removed."""

    kind: str  # of ``KINDS``
    at_s: float
    members: set[int] = field(default_factory=set[int])  # lost by it
    hosts: tuple[str, ...] = ()  # added by it
    may_pass: bool = False  # it may be over before a rank is lost
    is_in_view: bool = True  # a member of the view was lost


class Watcher:
    """Follows the progress files of the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unread: dict[Path, tuple[int, bytes]] = {}
        self.view = -1
        self.members: tuple[tuple[int, str, int], ...] = ()
        self.stepped: dict[int, int] = {}  # of a member, the last view it did so in
        self.step_s = 0.0  # when the newest step was applied
        self.num_ended = 0

    def look(self) -> None:
        """Read new lines."""
        for path in self._folder.glob("progress-*"):
            offset, rest = self._unread.get(path, (0, b""))
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            *lines, rest_now = (rest + data).split(b"\n")
            self._unread[path] = offset + len(data), rest_now
            number = int(path.name.rpartition("-")[2])
            for line in lines:
                self._take(parse_mark(line.decode(), number))

    def _take(self, mark: Mark) -> None:
        if mark.is_view:
            if mark.view > self.view:
                self.view, self.members = mark.view, mark.members
        elif mark.is_end:
            self.num_ended += 1
        else:
            self.stepped[mark.member] = mark.view
            self.step_s = max(self.step_s, mark.at_s)


class Job:
    """A training under way, and the faults that it suffers from."""

    def __init__(
        self,
        cluster: Cluster,
        hosts: Sequence[Machine],
        launcher: HostProcess,
        folder: Path,
        chance: random.Random,
    ) -> None:
        self.cluster, self.hosts, self.launcher = cluster, hosts, launcher
        self.folder, self.chance = folder, chance
        self.watcher = Watcher(folder)
        self.doomed: set[int] = set()
        self.troubled: set[str] = set()
        self.listed = [host.name for host in hosts]  # in the file of hosts
        self.later: list[tuple[float, Callable[[], None]]] = []

    # What is there

    def rank_processes(self, host: Machine) -> dict[int, Process]:
        """Return the ranks' own processes on a host, by member number."""
        found: dict[int, Process] = {}
        for process in self.cluster.processes(host):
            is_rank = len(process.words) > 1 and process.words[1].endswith("_rank.py")
            _, _, mark = process.environment.partition(b"RONDE_CHANNEL=")
            if is_rank and mark:
                found[int(mark.split(b"\0")[0].split(b":")[2])] = process
        return found

    def agent(self, host: Machine) -> int:
        """Return the agent's process number."""
        parents = {process.parent for process in self.rank_processes(host).values()}
        # Those of an agent that is gone belong to the host's first process.
        if not parents - {host.init_pid}:
            raise ImpossibleError
        return min(parents - {host.init_pid})

    def reaper(self, host: Machine) -> int:
        """Return the process number of the agent's reaper."""
        agent = self.agent(host)
        processes = self.cluster.processes(host)
        return next((p.parent for p in processes if p.pid == agent), agent)

    @property
    def members(self) -> set[int]:
        return {number for number, _, _ in self.watcher.members}

    def safe(self, members: set[int], hosts: set[str]) -> list[int]:
        """Return the ranks that must live: see Note [The spared rank]."""
        watcher, bad = self.watcher, self.troubled | hosts
        gone = self.doomed | members
        return [
            number
            for number, host, _ in watcher.members
            if host not in bad
            and number not in gone
            and watcher.stepped.get(number, -1) == watcher.view
        ]

    def well(self) -> list[Machine]:
        """Return hosts that nothing is wrong with, in a random order."""
        hosts = [host for host in self.hosts if host.name not in self.troubled]
        return self.chance.sample(hosts, len(hosts))

    # Time

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        """Do something later, or at the latest when the job is to end."""
        self.later.append((time.monotonic() + wait_s, act))

    def act_due(self, *, is_end: bool = False) -> None:
        """Do everything that is due; at the end all of it."""
        now_s = time.monotonic()
        due = [each for each in self.later if is_end or each[0] <= now_s]
        self.later = [each for each in self.later if each not in due]
        for _, act in due:
            act()

    def trouble(self, host: Machine, wait_s: float, end: Callable[[], None]) -> None:
        """Have a host be in trouble for a while."""
        self.troubled.add(host.name)

        def over() -> None:
            end()
            self.troubled.discard(host.name)

        self.after(wait_s, over)

    def list_hosts(self) -> None:
        """Write the file of hosts."""
        path = self.folder / "hosts"
        text = "".join(f"{name} slots={PER_HOST}\n" for name in self.listed)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)


Act = Callable[[Job, Fault], None]


def _signal_rank(job: Job, fault: Fault, sig: int) -> tuple[int, Process]:
    """Signal a rank that is not the last one spared."""
    ranks = {n: p for host in job.well() for n, p in job.rank_processes(host).items()}
    numbers = job.chance.sample(sorted(ranks), len(ranks))
    if job.chance.random() < _IN_VIEW:
        numbers.sort(key=lambda number: number not in job.members)
    for number in numbers:
        if number not in job.doomed and job.safe({number}, set()):
            with suppress(ProcessLookupError):
                os.kill(ranks[number].pid, sig)
            fault.members.add(number)
            job.doomed.add(number)
            return number, ranks[number]
    raise ImpossibleError


def _lose_host(job: Job, fault: Fault) -> Machine:
    """Choose a host that will be lost with all its ranks."""
    for host in job.well():
        members = {n for n, name, _ in job.watcher.members if name == host.name}
        members |= set(job.rank_processes(host))
        if members and job.safe(members, {host.name}):
            fault.members |= members
            job.doomed |= members
            return host
    raise ImpossibleError


def _kill(job: Job, fault: Fault) -> None:
    _signal_rank(job, fault, job.chance.choice(_SIGNALS))


def _stop(job: Job, fault: Fault) -> None:
    _, process = _signal_rank(job, fault, signal.SIGSTOP)

    def wake() -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)

    job.after(job.chance.uniform(2.0, 8.0), wake)  # it must be dead by then


def _stop_briefly(job: Job, fault: Fault) -> None:
    number, process = _signal_rank(job, fault, signal.SIGSTOP)
    fault.may_pass = True
    fault.members.discard(number)

    def wake() -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        job.doomed.discard(number)

    job.after(job.chance.uniform(0.1, 1.2), wake)


def _crash(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    _cut_link(job, fault, host)  # its kernel would close connections
    job.cluster.crash(host)
    job.trouble(host, job.chance.uniform(1.0, 8.0), lambda: job.cluster.boot(host))


def _cut_link(job: Job, fault: Fault, host: Machine) -> None:
    job.cluster.cut(host)
    fault.at_s = time.monotonic()  # on a busy machine that takes its time


def _power_off(job: Job, fault: Fault) -> None:
    """Kill all that runs on a host: connections are closed."""
    host = _lose_host(job, fault)
    job.troubled.add(host.name)
    for process in job.cluster.processes(host):
        if process.pid != host.init_pid:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def repair() -> None:
        job.cluster.kill_sshd(host)
        job.cluster.start_sshd(host)

    job.trouble(host, job.chance.uniform(0.5, 4.0), repair)


def _kill_agent(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    process = job.agent(host) if job.chance.random() < 0.6 else job.reaper(host)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _stop_agent(job: Job, fault: Fault) -> None:
    fault.may_pass = True  # the agent's keeper wakes it
    host = _lose_host(job, fault)
    agent = job.agent(host)
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGSTOP)

    def wake() -> None:
        with suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)

    job.trouble(host, job.chance.uniform(*CUT_S), wake)


def _cut(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    _cut_link(job, fault, host)
    wait_s = job.chance.uniform(*CUT_S)
    job.trouble(host, wait_s, lambda: job.cluster.restore(host))


def _flap(job: Job, fault: Fault) -> None:
    fault.may_pass = True
    host = _lose_host(job, fault)
    members, fault.members = fault.members, set()
    job.cluster.cut(host)
    job.after(FLAP_S, lambda: job.cluster.restore(host))
    # It may be lost all the same, as TCP waits before it sends again.
    job.trouble(host, FLAP_S + 6.0, lambda: job.doomed.difference_update(members))


def _one_way(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    way = job.chance.choice(("input", "output"))
    done = job.cluster.run(host, ["nft", _DROP.format(way=way)])
    if done.returncode:
        raise ClusterError(f"nft must drop packets, got: {done.stderr}")

    def repair() -> None:
        job.cluster.run(host, ["nft", "delete", "table", "inet", "planted"])

    job.trouble(host, job.chance.uniform(*CUT_S), repair)


def _remove_host(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    if host.name not in job.listed:
        raise ImpossibleError
    job.listed.remove(host.name)
    job.list_hosts()


def _add_host(job: Job, fault: Fault) -> None:
    missing = [host.name for host in job.hosts if host.name not in job.listed]
    if not missing:
        raise ImpossibleError
    name = job.chance.choice(missing)
    job.listed.append(name)
    job.list_hosts()
    fault.hosts = (name,)


def _notify_host(job: Job, fault: Fault) -> None:
    host = _lose_host(job, fault)
    with suppress(ProcessLookupError):
        os.kill(job.reaper(host), signal.SIGTERM)


def _several(job: Job, fault: Fault) -> None:
    """Break several things at once."""
    acts = (_kill, _kill, _stop, _crash, _power_off, _kill_agent, _cut)
    _in_turn(job, fault, [job.chance.choice(acts) for _ in range(3)], 0.0)


def _while_forming(job: Job, fault: Fault) -> None:
    """Break something, and something else before the next view has begun."""
    acts = (_kill, _kill, _power_off, _kill_agent)
    _in_turn(job, fault, [_kill, job.chance.choice(acts)], 0.3)


def _in_turn(job: Job, fault: Fault, acts: Sequence[Act], apart_s: float) -> None:
    num_done, at_s = 0, fault.at_s
    for act in acts:
        with suppress(ImpossibleError):
            if num_done:
                time.sleep(job.chance.uniform(0.0, apart_s))
            act(job, fault)
            num_done += 1
    fault.at_s = at_s
    if num_done < 2:
        raise ImpossibleError


KINDS: dict[str, tuple[float, Act]] = {
    "rank killed": (6, _kill),
    "rank stopped": (2, _stop),
    "rank stopped briefly": (1, _stop_briefly),
    "host silent": (1.5, _crash),
    "host's processes killed": (1.5, _power_off),
    "agent killed": (1.5, _kill_agent),
    "agent stopped": (0.7, _stop_agent),
    "link cut": (1.5, _cut),
    "link flaps, 3 s": (1.2, _flap),
    "link one way": (1.2, _one_way),
    "host removed": (1.5, _remove_host),
    "host added": (4, _add_host),
    "host ends with notice": (1.5, _notify_host),
    "several at once": (2, _several),
    "loss while a view forms": (2.5, _while_forming),
}
PLANNED = ("host removed", "host added", "host ends with notice")
