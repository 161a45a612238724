"""The controller: runs one job through its agents and says how it ended."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import HostError, HostFailure, LaunchError
from ronde.launch.gathering import Gathering
from ronde.launch.hiring import Hiring
from ronde.launch.hosts.host import Host
from ronde.launch.job import Job
from ronde.launch.lineage import children, sweep
from ronde.launch.messages import Leave
from ronde.launch.node import Node
from ronde.launch.output_process import OutputProcess
from ronde.launch.plan import Plan
from ronde.launch.running import Running
from ronde.launch.sink import Generation, Unseen
from ronde.launch.start_progress import StartProgress
from ronde.launch.starting import Starting
from ronde.launch.switchboard import Switchboard
from ronde.launch.verdict import LostHost, RankEnd, Verdict

if TYPE_CHECKING:
    from ronde.launch.interview import Interview

_LEAVE_S = 10.0
_LAST_OUTPUT_S = 1.0


class Arrangement(NamedTuple):
    """A plan, and who keeps it.

    Attributes:
        plan: What runs where.
        nodes: The hosts' agents, in the order of the plan's shares.
        check: Called with the port that is held for rank 0, and the nodes as they are
            now: whether all reach it.
        notices: What the user should know of it, each a sentence.
    """

    plan: Plan
    nodes: tuple[Node, ...]
    check: Callable[[int, Sequence[Node]], None]
    notices: tuple[str, ...] = ()


class Restarts(NamedTuple):
    """When all ranks are started again.

    Attributes:
        limit: How often at most.
        not_on: Exit codes of the job after which they are not.
    """

    limit: int = 0
    not_on: frozenset[int] = frozenset()

    def follows_loss(self, epoch: int) -> bool:
        """Say whether another generation follows one that a host was lost before.

        None does before the first one has run: hosts are not known to be fit yet.
        """
        return 0 < epoch < self.limit

    def wants(self, verdict: Verdict, epoch: int) -> bool:
        """Say whether another generation follows one that ended so."""
        return epoch < self.limit and verdict.is_worth_restart(self.not_on)


class _Prepared(NamedTuple):
    """A generation that all hosts are ready to start.

    Attributes:
        jobs: Each host's part.
        port: Held for rank 0.
        took_s: How long it took.
    """

    jobs: tuple[Job, ...]
    port: int
    took_s: float


class Controller:
    """One job: its agents, from their start to their end.

    Guarantees that when ``close`` has returned, no process of the job is left on this
    host but those that the kernel does not let die, which were named, and that every
    other host was told or will find out by itself. For the case that an agent here is
    killed this process should adopt orphans (``lineage.adopt_orphans``).

    Args:
        output: Gets all output.
        signal_fd: From ``signals.caught_signals``: reads the user's signals.
        hiring: How hosts get agents.
        progress: Says what a slow start waits for; None where nobody is told.
    """

    def __init__(
        self,
        output: OutputProcess | Unseen,
        signal_fd: int,
        hiring: Hiring,
        progress: StartProgress | None = None,
    ) -> None:
        self._output = output
        progress = progress or StartProgress(output.notice)
        self._board = Switchboard(output, signal_fd, progress, hiring.timeouts)
        self._hiring = hiring
        self._others = children()
        self._is_clean = True
        self._agents_s = 0.0

    def gather(self, hosts: Sequence[Host], patience_s: float = 0.0) -> list[Node]:
        """Return a node for each host, in their order, all of which have said hello.

        Args:
            hosts: Which.
            patience_s: How long one that is not reached is tried again.

        Raises:
            HostError: Some cannot take part; all of them are listed.
            InterruptedStartError: The user has ended it.
        """
        begun_s, hiring = time.monotonic(), self._hiring
        known = hiring.look_up(hosts, self._board.signal_fd)

        def start(host: Host) -> Node:
            node, took_s = hiring.start(host), hiring.looked_up_s
            self._board.progress.took(f"{host.name} was looked up", took_s)
            return node

        nodes = Gathering(self._board, start, hiring.explain, known).run(
            hosts, patience_s
        )
        self._agents_s = time.monotonic() - begun_s
        return nodes

    def gather_ready(
        self, hosts: Sequence[Host]
    ) -> tuple[list[Node], tuple[HostFailure, ...]]:
        """Return a node for each host that can take part, and why others cannot.

        Raises:
            InterruptedStartError: The user has ended it.
        """
        try:
            return self.gather(hosts), ()
        except HostError as error:
            ready = [node for node in self._board.live_nodes if node.hello]
            return ready, error.failures

    def interview(self, nodes: Sequence[Node], module: str) -> "Interview":
        """Start a program on each host to speak with; it ends with the agent."""
        # Imported where it is needed: no job is interviewed.
        from ronde.launch.interview import Interview

        return Interview(self._board, nodes, module)

    def locate(
        self, nodes: Sequence[Node], addresses: Sequence[str], port: int = 0
    ) -> list[tuple[str, ...]]:
        """Return each node's own addresses towards others: see ``messages.Locate``."""
        return Starting(self._board).locate(nodes, addresses, port)

    def run(self, arrangement: Arrangement, restarts: Restarts) -> Verdict:
        """Run all ranks to their end, and again where that is asked for.

        Raises:
            UsageError: The job cannot be started as it was asked for.
            LaunchError: An agent failed, or hosts cannot take part (HostError).
            InterruptedStartError: The user has ended it before ranks ran.
        """
        crew, epoch = list(arrangement.nodes), 0
        for notice in arrangement.notices:
            self._output.notice(notice)
        jobs = arrangement.plan.jobs(epoch)
        places = [
            (share.host.name, plan)
            for share, job in zip(arrangement.plan.shares, jobs, strict=True)
            for plan in job.ranks
        ]
        self._output.planned(jobs[0].job_id, jobs[0].argv, places)
        while True:
            try:
                prepared = self._prepare(arrangement, crew, epoch)
            except LaunchError:
                lost = [node.name for node in crew if node.is_over]
                if not lost or not restarts.follows_loss(epoch):
                    raise
                why = f"{lost[0]} was lost"
            else:
                verdict = self._run_once(arrangement.plan, crew, prepared)
                self._output.finished(verdict)
                if not restarts.wants(verdict, epoch):
                    return verdict
                why = _why(verdict)
            epoch += 1
            self._output.notice(f"restart {epoch} of {restarts.limit}: {why}")
            crew = self._replace_lost(crew)

    def _prepare(
        self, arrangement: Arrangement, crew: Sequence[Node], epoch: int
    ) -> _Prepared:
        """Have all hosts ready for one generation of ranks."""
        begun_s, jobs = time.monotonic(), arrangement.plan.jobs(epoch)
        port = Starting(self._board).prepare(crew, jobs)
        arrangement.check(port, crew)
        return _Prepared(jobs, port, time.monotonic() - begun_s)

    def _run_once(
        self, plan: Plan, crew: Sequence[Node], prepared: _Prepared
    ) -> Verdict:
        """Run one generation of ranks to its end."""
        jobs = prepared.jobs
        self._output.begin(Generation(plan.facts.job_id, jobs[0].epoch, plan.hosts))
        Starting(self._board).await_output()

        def tell(ranks_s: float) -> None:
            timings = {"agents_s": self._agents_s, "ready_s": prepared.took_s}
            self._output.began(timings | {"ranks_s": ranks_s})

        running = Running(self._board, crew, jobs, tell)
        return running.run(plan.address, prepared.port)

    def _replace_lost(self, crew: Sequence[Node]) -> list[Node]:
        """Bring agents to the hosts that lost theirs; nothing of the old may be left.

        What a host does that was silent is not known; its new agent waits until all
        of the old generation has ended there.
        """
        crew = list(crew)
        # While one comes back another may be lost.
        while lost := [node for node in crew if node.is_over]:
            for node in lost:
                node.link.wire.wait(_LEAVE_S)
                self._board.nodes.remove(node)
            names = ", ".join(node.name for node in lost)
            return_s = self._board.timeouts.return_s
            self._output.notice(
                f"connecting to {names} again, for up to {return_s:g} s"
            )
            fresh = self.gather([node.host for node in lost], return_s)
            by_name = {node.name: node for node in fresh}
            crew = [by_name.get(node.name, node) for node in crew]
        return crew

    def write_out(self, *, is_hurried: bool) -> int:
        """Have what is left to show written; see ``Switchboard.write_out``.

        Args:
            is_hurried: What stalls is not waited for.
        """
        return self._board.write_out(_LAST_OUTPUT_S if is_hurried else None)

    def close(self) -> None:
        """End all agents and wait for their ends."""
        for node in self._board.live_nodes:
            if node.hello is None:
                # Whatever leads there need not end because nobody writes to it.
                node.link.wire.kill()
            node.link.send(Leave())
            node.close()
        due_s = time.monotonic() + _LEAVE_S
        for node in self._board.nodes:
            code = node.link.wire.wait(max(0.0, due_s - time.monotonic()))
            self._is_clean = self._is_clean and code == 0
        if not self._is_clean:
            sweep(on_reaped=_ignore, spared=self._others)


def _ignore(_pid: int, _status: int) -> None:
    """Need no status: the agent was to report it."""


def _why(verdict: Verdict) -> str:
    match verdict.cause:
        case RankEnd():
            return f"rank {verdict.cause.rank} failed on {verdict.cause.host}"
        case LostHost():
            return f"{verdict.cause.host} was lost"
        case None:
            return "a rank failed"
