"""The beginning and the end of a session."""

import atexit
import logging
import os
import socket
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch

from ronde.collectives import Communicator, Connections, exchange_hosts
from ronde.collectives.connections import DEFAULT_TIMEOUT_S
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.coordinator import CoordinationOptions
from ronde.data_parallel import BucketTuningOptions
from ronde.errors import UsageError
from ronde.memory import malloc_thresholds
from ronde.torch.autotune import fusion_options, tuning_options
from ronde.torch.members import Job, ProcessSetState
from ronde.torch.process_sets import ProcessSet, global_process_set, register
from ronde.torch.recordings import Recordings
from ronde.torch.session import (
    Session,
    begin,
    current_session,
    end,
    is_initialized,
)
from ronde.torch.timeline import close_timeline, open_timeline
from ronde.world import RankInfo, World, read_rank_info
from ronde.world.environment import read_malloc_tuning, send_exit_notice
from ronde.world.horovod_config import (
    HorovodConfig,
    read_horovod_config,
    report_ignored,
)

_START_TIMEOUT_S = 300.0
_DYNAMIC = "dynamic"
_asked_for: set[str] = set()
"""Horovod remembers ``init(process_sets="dynamic")`` over a shutdown; so do we."""


@outside_compiler
def init(
    comm: Sequence[int] | Any = None,  # noqa: ANN401  mpi4py's
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    engine: str = "",
) -> None:
    """Join the other ranks; collective. Does nothing when that is done already.

    The world is read from the environment of whichever launcher started this process:
    ``ronde run``, torchrun, mpirun, srun or horovodrun; without one it is a world of
    one. Horovod's variables, ``HOROVOD_*``, are read here.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of all ranks.
        process_sets: Sets to register, equal on all ranks; or ``"dynamic"``, to allow
            ``add_process_set()`` later.
        engine: What is to move tensors, equal on all ranks; empty takes the
            environment's.

    Raises:
        UsageError: There is no such engine, it is not installed, or two process sets
            have the same ranks.
        WorldError: The environment is partial or contradicts itself.
        CollectiveError: The other ranks could not be reached.
    """
    sets = _static_sets(process_sets)
    if not is_initialized():
        _start(comm, engine)
    _register_all(current_session(), sets)


@outside_compiler
def shutdown() -> None:
    """Leave; pending handles are forgotten. ``init()`` may be called again."""
    atexit.unregister(_leave)
    session = end()
    if session is None:
        return
    try:
        session.close()
    finally:
        close_timeline(session)


def _leave(pid: int) -> None:
    """Shut down at the end of the program, and not of a process that it has forked."""
    if os.getpid() == pid:
        send_exit_notice()
        shutdown()


def _start(comm: Sequence[int] | Any, engine: str) -> None:  # noqa: ANN401  mpi4py's
    knobs = read_horovod_config()
    _set_log_level(knobs)
    claim = read_rank_info()
    if claim.rank == 0:
        report_ignored(knobs)
        _report_stray(claim)
    _check_comm(comm, claim)
    tuning = tuning_options(knobs, claim.rank)
    connections = Connections(
        claim,
        timeout_s=knobs.collective_timeout_s or DEFAULT_TIMEOUT_S,
        engine=engine or _hierarchical(claim, knobs),
    )
    ranks = tuple(range(claim.size))
    communicator = connections.connect("set0", ranks)
    with ExitStack() as undo:
        undo.callback(communicator.close)
        hosts = _hosts(claim, communicator)
        world = claim.world or World.from_hosts(claim.rank, hosts)
        timeout_s = knobs.start_timeout_s or _START_TIMEOUT_S
        job = Job(connections, hosts, _options(knobs, tuning), timeout_s)
        with _pinned(knobs.thread_affinity, world.local_rank):
            member = ProcessSetState.connect(job, 0, ranks, communicator)
        undo.pop_all()
    session = Session(
        world=world,
        claim=claim,
        knobs=knobs,
        job=job,
        is_dynamic=knobs.has_dynamic_process_sets or _DYNAMIC in _asked_for,
        sets={0: ranks},
        members={0: member},
        recordings=Recordings(
            claim.rank, claim.size, hosts[claim.rank], connections.store
        ),
        tuning=tuning,
    )
    _tune_malloc(world.local_size)
    global_process_set.ranks = list(ranks)
    session.heed(session.members[0])
    begin(session)
    atexit.register(_leave, os.getpid())
    open_timeline(session)


@cache
def _tune_malloc(local_size: int) -> None:
    """Have a rank without an accelerator keep the memory of its steps."""
    if not read_malloc_tuning() or torch.accelerator.is_available():
        return
    thresholds = malloc_thresholds(local_size)
    if thresholds is not None:
        thresholds.apply()


def _set_log_level(knobs: HorovodConfig) -> None:
    """Have ronde say as much as ``HOROVOD_LOG_LEVEL`` asks for; nobody else."""
    if knobs.log_level is not None:
        logging.getLogger("ronde").setLevel(knobs.log_level)


def _report_stray(claim: RankInfo) -> None:
    if claim.stray:
        logging.getLogger("ronde").warning(
            "Ignored %s: no launcher sets so little. This is rank %s of %s. Unset it, "
            "or start the program with ronde run.",
            *(", ".join(claim.stray), claim.rank, claim.size),
        )


@contextmanager
def _pinned(cores: Sequence[int], local_rank: int) -> Generator[None]:
    """Keep the threads that are started here on ``HOROVOD_THREAD_AFFINITY``'s core.

    Raises:
        UsageError: There is no such core, or none for this rank.
    """
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {cores[local_rank]})
    except (IndexError, OSError) as error:
        raise UsageError(
            "HOROVOD_THREAD_AFFINITY must name one of the cores "
            f"{sorted(before)} for each local rank, got {list(cores)} for local rank "
            f"{local_rank}. Correct it, or unset it."
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _static_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if not isinstance(process_sets, str):
        return list(process_sets or ())
    if process_sets.lower() != _DYNAMIC:
        raise UsageError(
            f"process_sets must be a list of ProcessSet or {_DYNAMIC!r}, got "
            f"{process_sets!r}."
        )
    _asked_for.add(_DYNAMIC)
    return []


def _register_all(session: Session, sets: list[ProcessSet]) -> None:
    """Register the sets that ``init`` was given; those it had already stay."""
    before = {ranks: set_id for set_id, ranks in session.sets.items() if set_id}
    for number, process_set in enumerate(sets):
        process_set.process_set_id = before.pop(tuple(process_set.ranks), None)
        if process_set.process_set_id is None and not register(session, process_set):
            raise UsageError(
                "Horovod could not be initialized because process_sets entry number "
                f"{number} is a duplicate: {process_set}"
            )


def _check_comm(comm: Sequence[int] | Any, claim: RankInfo) -> None:  # noqa: ANN401  mpi4py's
    if comm is None:
        return
    every = list(range(claim.size))
    if isinstance(comm, Iterable):
        if list(cast("Iterable[int]", comm)) in ([], every):
            return
    elif ProcessSet(comm).ranks == every:
        global_process_set.mpi_comm = comm
        return
    raise UsageError(
        f"comm must be None or all ranks in order, got {comm} with size {claim.size}. "
        "Leave it out; give process_sets for some of the ranks."
    )


def _hierarchical(claim: RankInfo, knobs: HorovodConfig) -> str:
    """Return the engine that ``HOROVOD_HIERARCHICAL_*`` asks for, or empty."""
    is_asked = knobs.is_hierarchical and claim.engine == "auto"
    return "hierarchical" if is_asked and claim.local_size < claim.size else ""


def _hosts(claim: RankInfo, communicator: Communicator) -> tuple[str, ...]:
    """Return the host of every rank; collective where they may be on several."""
    host = socket.gethostname()
    if claim.local_size == claim.size:
        return (host,) * claim.size
    return tuple(exchange_hosts(communicator, host))


def _options(
    knobs: HorovodConfig, tuning: BucketTuningOptions | None
) -> CoordinationOptions:
    return CoordinationOptions(
        fusion_threshold_bytes=knobs.fusion_threshold_bytes,
        tuning=fusion_options(knobs, tuning),
        gather_time_s=knobs.cycle_time_s,
        cache_capacity=knobs.cache_capacity,
        is_group_alone=knobs.is_group_alone,
        stall_warning_s=knobs.stall_warning_s,
        stall_shutdown_s=knobs.stall_shutdown_s,
    )
