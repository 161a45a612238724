"""From what the user wants to a plan that all hosts can keep: who runs what where."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import UsageError
from ronde.launch.controller import Arrangement, Controller
from ronde.launch.directory import absolute_path
from ronde.launch.hosts.allocation import Share, allocate, hosts_to_ask, kept_out
from ronde.launch.hosts.host import SLOTS_CORES, SLOTS_GPUS, Host
from ronde.launch.messages import Hello
from ronde.launch.node import Node
from ronde.launch.placement.place import Place
from ronde.launch.plan import JobRequest, Plan, make_facts, unbound
from ronde.launch.slots import usable_cores

if TYPE_CHECKING:
    from ronde.launch.placement.rank_placement import PlacementRequest

_LOOPBACK = "127.0.0.1"

Preflight = Callable[[Controller, Sequence[Node]], tuple[str, ...]]
"""Checks hosts that have agents; returns warnings, raises HostError for faults."""


class Wish(NamedTuple):
    """What the user wants of hosts and ranks.

    Attributes:
        job: What runs.
        hosts: On which hosts, in the order of the ranks; empty for this machine.
        num_ranks: How many ranks; None for one a slot.
        min_ranks: How many suffice where there are fewer slots; None for all.
        interfaces: Names of network interfaces that the ranks may use, none for any.
        placement: How ranks get cores and GPUs; None leaves that to the scheduler.
        preflight: Checks the hosts before anything starts; None for no check.
    """

    job: JobRequest
    hosts: tuple[Host, ...] = ()
    num_ranks: int | None = None
    min_ranks: int | None = None
    interfaces: tuple[str, ...] = ()
    placement: "PlacementRequest | None" = None
    preflight: Preflight | None = None


def arrange(controller: Controller, wish: Wish, name: str) -> Arrangement:
    """Bring agents to the hosts and plan the job with what they say.

    Args:
        controller: Without agents so far.
        wish: What the user wants.
        name: Begins the job's id.

    Raises:
        UsageError: It cannot be had.
        HostError: Hosts cannot take part.
        InterruptedStartError: The user has ended it.
    """
    hosts = wish.hosts or (Host(os.uname().nodename),)
    asked = hosts_to_ask(hosts, wish.num_ranks, wish.min_ranks)
    nodes = controller.gather(asked)
    _require_different(nodes)
    remarks = wish.preflight(controller, nodes) if wish.preflight else ()
    by_name = {node.name: node for node in nodes}
    shares = allocate(
        hosts,
        wish.num_ranks,
        lambda host: _slots(by_name[host.name], len(asked)),
        wish.min_ranks,
    )
    crew = tuple(by_name[share.host.name] for share in shares)
    address, check = _LOOPBACK, _check_nothing
    host_env: tuple[dict[str, str], ...] = tuple(dict[str, str]() for _ in crew)
    if len(crew) > 1:
        if wish.job.is_mpi:
            raise UsageError(
                f"--engine mpi must run on one host here, got {len(crew)}. Let mpirun "
                "start the ranks: mpirun -n 4 -H a:2,b:2 python train.py"
            )
        address, host_env, check = _meet(controller, wish, crew)
    placed = [
        _place(wish, node, share) for node, share in zip(crew, shares, strict=True)
    ]
    plan = Plan(
        request=_directed(wish.job, crew),
        facts=make_facts(name, wish.job.max_restarts),
        shares=shares,
        places=tuple(places for places, _ in placed),
        address=address,
        host_env=host_env,
    )
    notices = remarks + tuple(text for _, texts in placed for text in texts)
    return Arrangement(plan, crew, check, notices + _left_out(wish, hosts, shares))


def _left_out(
    wish: Wish, hosts: Sequence[Host], shares: Sequence[Share]
) -> tuple[str, ...]:
    """Return what the user should know of hosts and ranks that are left out."""
    notices: tuple[str, ...] = ()
    if drained := kept_out(hosts):
        notices += (f"kept out by 0 slots: {drained}.",)
    num_ranks = shares[-1].ranks.stop
    if wish.num_ranks is not None and num_ranks < wish.num_ranks:
        text = f"{num_ranks} ranks start, not {wish.num_ranks}: there are {num_ranks} "
        notices += (f"{text}slots, and --min-np is {wish.min_ranks}.",)
    return notices


def _hello(node: Node) -> Hello:
    if node.hello is None:
        raise AssertionError("a node that was gathered has said hello")
    return node.hello


def _require_different(nodes: Sequence[Node]) -> None:
    by_identity: dict[str, str] = {}
    for node in nodes:
        other = by_identity.setdefault(_hello(node).identity, node.name)
        if other != node.name:
            raise UsageError(
                f"hosts must be different machines, got {other} and {node.name}, which "
                f"are one ({_hello(node).host}). Name it once, with all its slots."
            )


def _slots(node: Node, num_hosts: int) -> int:
    """Count the slots of a host where nobody did.

    Raises:
        UsageError: It must have a GPU, and has none.
    """
    machine = _hello(node).machine
    if node.host.slots == SLOTS_CORES:
        return usable_cores(machine)
    if node.host.slots == SLOTS_GPUS and not machine.gpus:
        raise UsageError(
            f"--nproc-per-node gpu must find a GPU on each host, got none on "
            f"{node.name}. Type a number, or --nproc-per-node cpu."
        )
    return len(machine.gpus) or (usable_cores(machine) if num_hosts == 1 else 1)


def _place(
    wish: Wish, node: Node, share: Share
) -> tuple[tuple[Place, ...], tuple[str, ...]]:
    """Return what a host gives its ranks, and what the user should know of that."""
    machine, num_ranks = _hello(node).machine, len(share.ranks)
    if wish.placement is None and not node.host.gpus:
        return unbound(usable_cores(machine), num_ranks), ()
    # Imported where they are needed: a job that is not bound must start at once.
    from ronde.launch.placement.rank_placement import UNPLACED, place_ranks

    placement = place_ranks(
        machine, node.host, num_ranks, wish.placement or UNPLACED, wish.job.env
    )
    return placement.places, placement.notices


def _directed(job: JobRequest, crew: Sequence[Node]) -> JobRequest:
    """Say where to start: on other hosts in the directory of the same name.

    In full here as well: an agent that starts ranks again is in it already.
    """
    if len(crew) == 1 and crew[0].is_here and not job.cwd:
        return job
    return job._replace(cwd=str(absolute_path(job.cwd)))


def _meet(
    controller: Controller, wish: Wish, crew: Sequence[Node]
) -> tuple[str, tuple[dict[str, str], ...], Callable[[int, Sequence[Node]], None]]:
    # Imported where they are needed: a job on one host has nobody to meet.
    from ronde.launch.placement.meeting_point import (
        HostNetwork,
        choose_meeting_point,
        find_candidates,
        require_answers,
    )

    networks = [
        HostNetwork(
            node.name,
            _hello(node).interfaces,
            node.host.address,
            {nic.name: nic.mbit_per_s for nic in _hello(node).machine.nics},
        )
        for node in crew
    ]
    candidates = find_candidates(networks, wish.interfaces)
    addresses = [candidate.address for candidate in candidates]
    sources = controller.locate(crew[1:], addresses)
    point = choose_meeting_point(networks, candidates, sources, wish.interfaces)

    def check(port: int, crew: Sequence[Node]) -> None:
        found = controller.locate(crew[1:], [point.address], port)
        require_answers(networks, point, port, [own[0] for own in found])

    env = tuple(point.environment(i, wish.job.env) for i in range(len(crew)))
    return point.address, env, check


def _check_nothing(_port: int, _crew: Sequence[Node]) -> None:
    """Need no check: all ranks are on one host."""
