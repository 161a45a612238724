"""The controller: runs a job from the user's specification to its result."""

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ronde.errors import Failure, HostError, HostFailure, LaunchError, UsageError
from ronde.launch.elastic_options import ElasticOptions
from ronde.launch.host import (
    SLOTS_OPEN,
    Host,
    HostShare,
    allocate,
    hosts_to_ask,
    unused_names,
)
from ronde.launch.hosts.node import EXIT_UNREACHABLE, AgentNode, AgentStarter, HostLoss
from ronde.launch.job.connector import AgentConnector
from ronde.launch.job.event_loop import EventLoop, Handler, StartProgress
from ronde.launch.job.failure import JobResult, LostHost
from ronde.launch.job.generation import FixedView, Generation, JobView, require_accepted
from ronde.launch.job.output import Attempt, MakeSinks, NoOutput, OutputProcess
from ronde.launch.job.plan import (
    JobPlan,
    JobSpec,
    assign_resources,
    count_slots_of,
    make_facts,
)
from ronde.launch.program import absolute_path
from ronde.launch.signals import InterruptedStartError, interruption_code
from ronde.launch.wire import messages
from ronde.processes import adopting_orphans, children, sweep
from ronde.units import counted

if TYPE_CHECKING:
    from ronde.launch.hosts.join_server import JoinServer
    from ronde.launch.job.programs import RemotePrograms

_LOOPBACK = "127.0.0.1"
_LEAVE_S = 10.0
_LAST_OUTPUT_S = 1.0

Preflight = Callable[["Controller", Sequence[AgentNode]], tuple[str, ...]]
"""Checks connected hosts; returns warnings, raises HostError for faults."""


class Controller(Handler):
    """Starts a job's agents, runs the job, and ends them.

    This process must adopt orphans. After ``close`` no process of the job runs on this
    host, except processes that survived SIGKILL, which were reported. Agents on other
    hosts end their processes at once, or when they notice the loss of the connection.
    """

    def __init__(
        self,
        output: OutputProcess | NoOutput,
        signal_fd: int,
        starter: AgentStarter,
        progress: StartProgress | None = None,
        join_server: "JoinServer | None" = None,
    ) -> None:
        self._output = output
        progress = progress or StartProgress(output.notice)
        super().__init__(EventLoop(output, signal_fd, progress, starter.timeouts))
        self._starter = starter
        if join_server is not None and join_server.config.stays_open:
            self._loop.join_server = join_server
            join_server.notice = output.notice
        self._others = children()
        self._answers: dict[str, messages.FromAgent] = {}
        self._lost: list[tuple[AgentNode, HostLoss]] = []

    def connect(
        self, hosts: Sequence[Host], patience_s: float = 0.0
    ) -> list[AgentNode]:
        """Return a node for each host; connect to those that are not connected."""
        by_name = {node.name: node for node in self._loop.live_nodes if node.hello}
        others = [host for host in hosts if host.name not in by_name]
        connector = AgentConnector(self._loop, self._starter)
        by_name |= {node.name: node for node in connector.run(others, patience_s)}
        return [by_name[host.name] for host in hosts]

    def connect_ready(
        self, hosts: Sequence[Host]
    ) -> tuple[list[AgentNode], tuple[HostFailure, ...]]:
        try:
            return self.connect(hosts), ()
        except HostError as error:
            ready = [node for node in self._loop.live_nodes if node.hello]
            return ready, error.failures

    def start_programs(
        self, nodes: Sequence[AgentNode], module: str
    ) -> "RemotePrograms":
        # Imported late: a job needs no programs.
        from ronde.launch.job.programs import RemotePrograms

        return RemotePrograms(self._loop, nodes, module)

    def locate(
        self, nodes: Sequence[AgentNode], addresses: Sequence[str], port: int = 0
    ) -> list[tuple[str, ...]]:
        step, done = ("to look for routes", "routes found")
        if port:
            step, done = ("to reach rank 0's port", "port reached")
        order = messages.Locate(tuple(addresses), port)
        answers = self._ask([(node, order) for node in nodes], step, done)
        return [a.sources if isinstance(a, messages.Located) else () for a in answers]

    def run(self, plan: JobPlan) -> JobResult:
        """Run all ranks; restart them up to ``max_restarts`` times if one fails."""
        spec, epoch = plan.spec, 0
        for notice in plan.notices:
            self._output.notice(notice)
        while True:
            nodes = plan.nodes
            try:
                jobs = plan.jobs(epoch)
                port = self._prepare(nodes, jobs)
                if plan.check is not None:
                    plan.check(port, nodes)
            except LaunchError:
                lost = [node.name for node in nodes if node.is_over]
                # Before the first generation has run, an error is not transient.
                if not lost or not 0 < epoch < spec.max_restarts:
                    raise
                why = f"{lost[0]} was lost"
            else:
                result = self._run_once(plan, nodes, jobs, port)
                self._output.finished(result)
                is_last = epoch >= spec.max_restarts
                if is_last or not result.is_worth_restart(spec.no_restart_codes):
                    return result
                # The signal may have come while ranks ended for another reason.
                if (number := self._loop.stopped_by) is not None:
                    raise InterruptedStartError(number)
                why = _why_again(result)
            epoch += 1
            self._output.notice(f"restart {epoch} of {spec.max_restarts}: {why}")
            plan = self._replace_lost(plan)

    def _run_once(
        self,
        plan: JobPlan,
        nodes: Sequence[AgentNode],
        jobs: Sequence[messages.NodeJob],
        port: int,
    ) -> JobResult:
        hosts = plan.hosts if plan.spec.elastic is None else ()
        self._output.begin(Attempt(plan.facts.job_id, jobs[0].epoch, hosts))
        loop = self._loop
        loop.job_id = plan.facts.job_id
        loop.progress.begin("to be ready", lambda: ["the output"])
        loop.serve(self, lambda: loop.output.is_ready, lambda: float("inf"))
        loop.progress.end("output ready")
        self._require_all()
        make_view: Callable[[Generation], JobView] = FixedView
        if plan.spec.elastic is not None:
            # Imported late: plain jobs need neither.
            from ronde.launch.job.elastic.hosts import JobHosts
            from ronde.launch.job.elastic.view import ElasticView

            connector = AgentConnector(loop, self._starter)
            hosts = JobHosts(plan, jobs[0].epoch, connector, loop.output.notice)
            make_view = partial(ElasticView, loop=loop, plan=plan, hosts=hosts)
        generation = Generation(loop, nodes, jobs, make_view)
        self._add_watch_programs(plan.spec, generation)
        return generation.run(plan.address, port)

    def _add_watch_programs(self, spec: JobSpec, generation: Generation) -> None:
        if spec.hang_timeout_s == float("inf") and not spec.has_live_view:
            return
        # Imported late: plain jobs need none.
        from ronde.launch.job.watch_programs import WatchProgram

        if spec.hang_timeout_s < float("inf"):
            hang_watch = WatchProgram(
                "--hang-timeout",
                "ronde.monitor.hang_watch",
                lambda line: generation.on_hang(json.loads(line)),
                str(spec.hang_timeout_s),
            )
            generation.watch_programs.append(hang_watch)
        if spec.has_live_view:
            live_view = WatchProgram(
                "--top",
                "ronde.cli.top",
                lambda line: self._output.live_view(json.loads(line)),
                on_end=lambda: self._output.live_view(()),
            )
            generation.watch_programs.append(live_view)

    def _replace_lost(self, plan: JobPlan) -> JobPlan:
        server, return_s = self._loop.join_server, self._loop.timeouts.return_s
        if server is not None:
            return self._await_nodes(plan, server)
        nodes = plan.nodes
        # Another may be lost meanwhile.
        while lost := self._remove_lost(nodes):
            names = ", ".join(node.name for node in lost)
            self._output.notice(
                f"connecting to {names} again, for up to {return_s:g} s"
            )
            fresh = self.connect([node.host for node in lost], return_s)
            by_name = {node.name: node for node in fresh}
            nodes = tuple(by_name.get(node.name, node) for node in nodes)
        return plan._replace(nodes=nodes)

    def _await_nodes(self, plan: JobPlan, server: "JoinServer") -> JobPlan:
        """Plan the job again once other nodes have joined in the place of lost ones."""
        num, limit_s = server.config.num_nodes, server.config.timeout_s
        due_s = time.monotonic() + limit_s
        while True:
            names = ", ".join(node.name for node in self._remove_lost(self._loop.nodes))
            server.advance()
            if len(server.hosts) < num:
                text = f"waiting for {names} or other nodes to join"
                self._output.notice(f"{text}, for up to {limit_s:g} s")
            if not self._loop.serve(
                self, lambda: len(server.hosts) >= num, lambda: due_s
            ):
                raise HostError(
                    f"{names} was lost, and no other node joined within {limit_s:g} s. "
                    f"{server.cure} Or wait longer: --join-timeout"
                )
            hosts = plan.spec.hosts[0], *server.choose(num)
            try:
                again = resolve(self, plan.spec._replace(hosts=hosts))
                return again._replace(facts=plan.facts)
            except LaunchError:
                live = {node.name for node in self._loop.live_nodes}
                if live.issuperset(host.name for host in hosts):
                    raise

    def _remove_lost(self, nodes: Sequence[AgentNode]) -> list[AgentNode]:
        lost = [node for node in nodes if node.is_over]
        for node in lost:
            node.transport.wait(_LEAVE_S)
            self._loop.nodes.remove(node)
        return lost

    def _prepare(
        self, nodes: Sequence[AgentNode], jobs: Sequence[messages.NodeJob]
    ) -> int:
        step = ("to check program and directory", "program and directory checked")
        answers = self._ask(list(zip(nodes, jobs, strict=True)), *step)
        require_accepted(list(zip(nodes, answers, strict=True)), len(nodes))
        return max(a.master_port for a in answers if isinstance(a, messages.Ready))

    def _ask(
        self, orders: Sequence[tuple[AgentNode, messages.ToAgent]], step: str, done: str
    ) -> list[messages.FromAgent]:
        self._answers, self._lost = {}, []
        for node, order in orders:
            node.send(order)
        nodes = [node for node, _ in orders]

        def awaited() -> list[AgentNode]:
            return [n for n in nodes if not n.is_over and n.name not in self._answers]

        progress = self._loop.progress
        progress.begin(step, lambda: [node.name for node in awaited()])
        limit_s = self._loop.timeouts.answer_s
        due_s = time.monotonic() + limit_s
        self._loop.serve(self, lambda: not awaited(), lambda: due_s)
        for node in awaited():
            reason = f"its agent did not answer within {limit_s:g} s"
            node.transport.kill()
            self._loop.lose(self, node, HostLoss(reason, EXIT_UNREACHABLE))
        self._require_all()
        progress.end(done)
        return [self._answers[node.name] for node in nodes]

    def on_message(self, node: AgentNode, message: messages.FromAgent) -> None:
        match message:
            case messages.Ready() | messages.Refused() | messages.Located():
                self._answers[node.name] = message
            case messages.HostEnding():
                raise InterruptedStartError(message.signal)
            case _:
                super().on_message(node, message)

    def on_loss(self, node: AgentNode, loss: HostLoss) -> None:
        self._lost.append((node, loss))

    def _require_all(self) -> None:
        for node, loss in self._lost:
            if node.is_here:
                text = f"agent on {node.name} exited before the job ended"
                raise LaunchError(f"{text}: {loss.reason}.")
        failures = [
            HostFailure(node.name, Failure(loss.reason, f"ssh {node.name}"))
            for node, loss in self._lost
        ]
        if failures:
            verb = "was" if len(failures) == 1 else "were"
            hosts = counted(len(failures), "host")
            raise HostError(f"{hosts} {verb} lost before the ranks started.", failures)

    def write_out(self, *, is_hurried: bool) -> int:
        return self._loop.write_out(_LAST_OUTPUT_S if is_hurried else float("inf"))

    def close(self) -> None:
        if self._loop.status is not None:
            self._loop.status.close()
        if self._loop.join_server is not None:
            self._loop.join_server.close()
        for node in self._loop.live_nodes:
            if node.hello is None:
                # Its ssh need not end when its input is closed.
                node.transport.kill()
            node.close()
        due_s = time.monotonic() + _LEAVE_S
        codes = [n.transport.wait(due_s - time.monotonic()) for n in self._loop.nodes]
        if self._loop.has_strays or any(code != 0 for code in codes):
            sweep(spared=self._others)


def _why_again(result: JobResult) -> str:
    if isinstance(result.cause, LostHost):
        return f"{result.cause.host} was lost"
    if result.cause is not None and not result.hang:
        return f"rank {result.cause.rank} failed on {result.cause.host}"
    return "the ranks hung" if result.hang else "a rank failed"


def resolve(
    controller: Controller, spec: JobSpec, preflight: Preflight | None = None
) -> JobPlan:
    """Connect to the hosts, and plan the job with their reported resources."""
    nodes, shares, notices = _find_hosts(controller, spec)
    notices += preflight(controller, nodes) if preflight else ()
    by_name = {node.name: node for node in nodes}
    job_nodes = tuple(by_name[share.host.name] for share in shares)
    address, check = _LOOPBACK, None
    host_env: list[dict[str, str]] = [{} for _ in job_nodes]
    # Two hosts may be two names of this machine.
    if len(job_nodes) > 1 and not all(node.is_here for node in job_nodes):
        address, host_env, check = _find_rendezvous(controller, spec, job_nodes)
    if spec.cwd or not all(node.is_here for node in job_nodes):
        # Absolute, since an agent that starts ranks again is in it already.
        spec = spec._replace(cwd=str(absolute_path(spec.cwd)))
    placed: list[HostShare] = []
    for share, node, env in zip(shares, job_nodes, host_env, strict=True):
        resources, texts = assign_resources(spec, node, len(share.ranks))
        placed.append(share._replace(resources=resources, env=env))
        notices += texts
    if drained := unused_names(spec.hosts):
        notices += (f"not used, with 0 slots: {drained}.",)
    size = shares[-1].ranks.stop
    if size < (spec.num_ranks or 0):
        text = f"{size} ranks start, not {spec.num_ranks}: there are {size} "
        notices += (f"{text}slots, and --min-ranks is {spec.min_ranks}.",)
    facts = make_facts(spec.max_restarts)
    return JobPlan(spec, facts, tuple(placed), address, job_nodes, check, notices)


_Found = tuple[Sequence[AgentNode], Sequence[HostShare], tuple[str, ...]]
"""Connected hosts, the shares of those with ranks, and notices."""


def _find_hosts(controller: Controller, spec: JobSpec) -> _Found:
    hosts = spec.hosts or (Host(os.uname().nodename),)
    if spec.elastic is not None:
        return _find_elastic_hosts(controller, hosts, spec.elastic)
    asked = hosts_to_ask(hosts, spec.num_ranks, spec.min_ranks)
    nodes = controller.connect(asked, spec.patience_s)
    _require_different(nodes)
    count = _slot_counter(nodes)
    return nodes, allocate(hosts, spec.num_ranks, count, spec.min_ranks), ()


def _find_elastic_hosts(
    controller: Controller, hosts: Sequence[Host], options: ElasticOptions
) -> _Found:
    """Connect to the hosts, drop those that fail, and use all slots of the rest."""
    size, min_ranks = options.num_processes, options.min_ranks
    if options.discovery is not None:
        min_ranks = 1  # others may still be found
    nodes, failures = controller.connect_ready(hosts_to_ask(hosts, size, min_ranks))
    if not nodes:
        raise HostError("no host can be used.", failures)
    notices = tuple(f"{f.host} cannot be used: {f.failure.reason}." for f in failures)
    hosts, count = [node.host for node in nodes], _slot_counter(nodes)
    shares = allocate(hosts, size, count, min_ranks)
    if len(hosts) > 1 or hosts[0].slots != SLOTS_OPEN:
        shares = allocate(hosts, None, count)
    return nodes, shares, notices


def _slot_counter(nodes: Sequence[AgentNode]) -> Callable[[Host], int]:
    by_name = {node.name: node for node in nodes}
    return lambda host: count_slots_of(by_name[host.name], len(nodes))


def _require_different(nodes: Sequence[AgentNode]) -> None:
    by_identity: dict[str, str] = {}
    for node in nodes:
        other = by_identity.setdefault(node.known_hello.identity, node.name)
        if other != node.name:
            raise UsageError(
                f"{other} and {node.name} are the same machine "
                f"({node.known_hello.host}). Name it once, with all its slots."
            )


def _find_rendezvous(
    controller: Controller, spec: JobSpec, nodes: Sequence[AgentNode]
) -> tuple[str, list[dict[str, str]], Callable[[int, Sequence[AgentNode]], None]]:
    # Imported late: a job on one host needs no rendezvous.
    from ronde.launch import network
    from ronde.launch.job.plan import network_of

    networks = [network_of(node) for node in nodes]
    candidates = network.find_candidates(networks, spec.interfaces)
    addresses = [candidate.address for candidate in candidates]
    sources = controller.locate(nodes[1:], addresses)
    point = network.choose_rendezvous(networks, candidates, sources, spec.interfaces)

    def check(port: int, nodes: Sequence[AgentNode]) -> None:
        found = controller.locate(nodes[1:], [point.address], port)
        network.require_answers(networks, point, port, [own[0] for own in found])

    env = [point.environment(i, spec.env) for i in range(len(nodes))]
    return point.address, env, check


@adopting_orphans()
def launch(
    spec: JobSpec,
    starter: AgentStarter,
    signal_fd: int,
    make_sinks: MakeSinks,
    preflight: Preflight | None = None,
    join_server: "JoinServer | None" = None,
) -> JobResult:
    """Run a job on all its hosts.

    When it returns or raises, no process of the job runs on this host; other hosts end
    their processes within their agents' lease.
    """
    output = OutputProcess(make_sinks)
    progress = StartProgress(output.notice, is_verbose=spec.is_verbose)
    controller = Controller(output, signal_fd, starter, progress, join_server)
    try:
        try:
            result = controller.run(resolve(controller, spec, preflight))
        except InterruptedStartError as error:
            code = interruption_code(error.number)
            result = JobResult(code, None, (), (), error.number)
            output.finished(result)
        finally:
            controller.close()
    except BaseException:
        # Earlier output comes before the error.
        controller.write_out(is_hurried=True)
        raise
    unread = controller.write_out(is_hurried=result.interrupted_by is not None)
    if result.exit_code == 0 and unread:
        return result._replace(exit_code=interruption_code(unread))
    return result


@adopting_orphans()
def dry_run(
    spec: JobSpec,
    starter: AgentStarter,
    signal_fd: int,
    notice: Callable[[str], None],
    preflight: Preflight | None = None,
) -> JobPlan:
    progress = StartProgress(notice, is_verbose=spec.is_verbose)
    controller = Controller(NoOutput(), signal_fd, starter, progress)
    try:
        return resolve(controller, spec, preflight)
    finally:
        controller.close()
