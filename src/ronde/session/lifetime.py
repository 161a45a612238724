"""Begin and end a session and its timelines."""

import atexit
import hashlib
import logging
import os
import socket
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ronde.collectives import Connections, exchange_hosts
from ronde.collectives.connections import DEFAULT_TIMEOUT_S
from ronde.collectives.scope import AbortScope
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.coordinator import CoordinationOptions
from ronde.coordination.waits import Waits
from ronde.errors import CollectiveError, NotInitializedError, UsageError
from ronde.membership.member import Member, membership_error, own_member
from ronde.membership.view import NO_VIEW, View, ViewBegins
from ronde.memory import malloc_thresholds
from ronde.session.process_sets import SetTable, register_all
from ronde.session.recordings import Recordings
from ronde.session.session import (
    ProcessSet,
    Session,
    current_session,
    global_process_set,
    parents,
    sessions,
)
from ronde.tuning import TuningLog, TuningOptions
from ronde.world import Launcher, RankInfo, World, read_rank_info
from ronde.world.environment import (
    is_child_of_rank,
    mark_rank,
    read_is_joining,
    read_malloc_tuning,
    send_exit_notice,
    unmark_rank,
)
from ronde.world.horovod_config import (
    DYNAMIC,
    HorovodConfig,
    read_horovod_config,
    report_ignored,
)

_logger = logging.getLogger("ronde")
_DYNAMIC_SETS = "dynamic"
_MAX_REASON = 200  # characters
_requested: set[str] = set()
"""As in Horovod, ``init(process_sets="dynamic")`` is remembered after a shutdown."""


@outside_compiler
def init(
    comm: Sequence[int] | Any = None,  # noqa: ANN401  mpi4py's
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    engine: str = "",
) -> None:
    """Connect with the other ranks, unless they are connected already; collective.

    Rank and size are read from the environment of the launcher, such as ``ronde run``,
    torchrun, mpirun or srun; without a launcher the size is 1. ``HOROVOD_*`` variables
    are read here.

    A child process of a rank, such as a DataLoader worker that imports the program
    anew, does not connect: ``rank()`` and similar functions return the parent's values,
    and collectives raise. A launcher that is started by a rank has its own ranks.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of all ranks.
        process_sets: Sets to register; or ``"dynamic"``, to allow ``add_process_set()``
            later. Must be equal on all ranks.
        engine: The engine that moves tensors, equal on all ranks; by default that of
            the environment.

    Raises:
        UsageError: The engine is not available, two process sets have the same ranks,
            or (as ``WorldError``) the environment is contradictory.
        CollectiveError: The other ranks cannot be reached.
    """
    sets = _static_sets(process_sets)
    if sessions:
        register_all(current_session(), sets)
    elif not parents:
        _start(comm, engine, sets)


@outside_compiler
def shutdown() -> None:
    """End the session; pending handles are dropped. ``init()`` may be called again."""
    atexit.unregister(_leave)
    if not sessions:
        return
    session = sessions.pop()
    unmark_rank()
    try:
        session.close()
    finally:
        # Last, as other ranks may shut down when they see this rank's session end.
        session.recordings.close()


@outside_compiler
def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin a timeline of all ranks; every rank should call this.

    Rank 0 writes its own operations to ``file_path`` as they happen, in Horovod's
    format. At the end it writes the operations of all ranks, on one clock, compressed
    if the name ends in ``.gz``. ``mark_cycles`` marks the times when submissions are
    sent. A running timeline is stopped first.

    Raises:
        UsageError: ``HOROVOD_TIMELINE`` was not set before ``init()``.
        OSError: Rank 0 cannot write the file.
    """
    session = current_session(NotInitializedError)
    if not session.config.timeline:
        raise UsageError(
            "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
        )
    stop_timeline()
    session.recordings.start(Path(os.fspath(file_path)), has_cycles=mark_cycles)
    _set_recorders(session)


@outside_compiler
def stop_timeline() -> None:
    """End a running timeline; rank 0 returns when the file is complete.

    Ranks that have not called this after 5 s are left out.
    """
    session = current_session(NotInitializedError)
    session.recordings.stop()
    _set_recorders(session)


def _set_recorders(session: Session) -> None:
    for state in session.states.values():
        state.coordinator.execution.recorder = session.recordings.recorder


def _leave(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        send_exit_notice()
        shutdown()


def _start(
    comm: Sequence[int] | Any,  # noqa: ANN401  mpi4py's
    engine: str,
    sets: list[ProcessSet],
) -> None:
    info = read_rank_info()
    if is_child_of_rank(_identity(info)):
        parents.append(info.world or World.from_hosts(info.rank, [""] * info.size))
        return
    # If a rank of an elastic job starts a launcher, the new ranks have no view.
    member = own_member() if info.launcher is Launcher.RONDE else None
    if member is not None and member.view.view == NO_VIEW and read_is_joining():
        _connect_alone(engine, sets)
        return
    if member is not None:
        _enter_view(member, engine, SetTable(sets), "")
        return
    _connect(comm, engine, info)
    register_all(current_session(), sets)


def _identity(info: RankInfo) -> str:
    """Return a digest of launcher values that is unique to this rank."""
    facts = (info.launcher, info.rank, info.size, info.job_id, info.store, info.meeting)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _connect_alone(engine: str, sets: list[ProcessSet]) -> None:
    """Begin a session of this rank alone, while the other ranks still train."""
    info = read_rank_info()
    alone = World(0, 1, 0, 1, 0, 1)
    _connect(None, engine, info._replace(**alone._asdict()), expected=info.world)
    current_session().process_sets.extend(sets)
    if info.world is not None:
        global_process_set.ranks = list(range(info.world.size))  # as after joining


def reform(reason: str = "") -> ViewBegins:
    """Leave the view of an elastic job and connect in the next one.

    ``reason`` is this rank's failure, if the view has not ended yet. Process sets keep
    their remaining ranks. The arguments of ``init`` are used again.

    Raises:
        SystemExit: The job continues without this process.
    """
    member, session = own_member(), current_session(NotInitializedError)
    if member is None:
        raise UsageError("the job is not elastic. Start it with ronde run --min-ranks.")
    sets = SetTable(session.process_sets, session.view)
    return _enter_view(member, session.engine, sets, reason)


class _Entry(NamedTuple):
    """The parts of a session that only an elastic job has."""

    scope: AbortScope
    view: View
    begins: ViewBegins
    sets: SetTable


def _enter_view(member: Member, engine: str, sets: SetTable, reason: str) -> ViewBegins:
    """Report to the launcher until the ranks of a new view are connected."""
    while True:
        try:
            if member.is_over or reason:
                _break_off(member, reason)
            view, begins = member.settle(member.step, "" if member.is_over else reason)
        finally:
            # No collective is in progress on any rank now.
            _break_off(member, reason or "this rank leaves it")
        entry = _Entry(_scope_of(member), view, begins, sets)
        info = read_rank_info()
        job_id = f"{info.job_id}.{view.view}.{begins.key}"
        info = info._replace(**view.world_of(member.number)._asdict(), job_id=job_id)
        try:
            _connect(None, engine, info, entry)
            sets.register(sessions[0], view)
        except CollectiveError as error:
            reason = shorten(error)
            continue
        sessions[0].recordings.mark(f"view {view.view}: {begins.reason}")
        return begins


def _scope_of(member: Member) -> AbortScope:
    scope, view = AbortScope(is_live=True), member.view.view
    member.call_on_end(lambda reason: scope.abort(membership_error(view, reason)))
    return scope


def _break_off(member: Member, reason: str) -> None:
    """End the session without waiting for other ranks."""
    if sessions:
        failure = membership_error(member.view.view, member.reason or reason)
        sessions[0].recordings.break_off()
        sessions[0].abort(failure)
        shutdown()


def shorten(error: Exception) -> str:
    """Return the first line of an error, shortened, without its final period."""
    return str(error).partition("\n")[0][:_MAX_REASON].removesuffix(".")


def _connect(
    comm: Sequence[int] | Any,  # noqa: ANN401  mpi4py's
    engine: str,
    rank_info: RankInfo,
    entry: _Entry | None = None,
    expected: World | None = None,
) -> None:
    config, rank = read_horovod_config(), rank_info.rank
    _report(config, rank_info)
    _check_comm(comm, rank_info)
    tuning = _tuning_options(config, rank)
    has_hosts = rank_info.local_size < rank_info.size
    if config.is_hierarchical and rank_info.engine == "auto" and has_hosts:
        engine = engine or "hierarchical"
    timeout_s = config.collective_timeout_s or DEFAULT_TIMEOUT_S
    connections = Connections(
        rank_info, timeout_s=timeout_s, engine=engine, scope=entry and entry.scope
    )
    ranks = tuple(range(rank_info.size))
    communicator = connections.connect("set0", ranks)
    with ExitStack() as undo:
        undo.callback(communicator.close)
        if entry is not None:
            failure = membership_error(entry.view.view, "a rank failed to connect")
            undo.callback(entry.scope.abort, failure)
            source = entry.view.rank_of(entry.begins.source)
            entry.sets.share(communicator, source)
        hosts = (socket.gethostname(),) * rank_info.size
        if has_hosts:
            hosts = tuple(exchange_hosts(communicator, hosts[rank]))
        world = rank_info.world or World.from_hosts(rank, hosts)
        recordings = Recordings(rank, rank_info.size, hosts[rank], connections.store)
        recordings.view = entry.view.view if entry else NO_VIEW
        session = Session(
            world=world,
            rank_info=rank_info,
            config=config,
            connections=connections,
            hosts=hosts,
            options=_coordination_options(config, tuning),
            is_dynamic=config.has_dynamic_process_sets or _DYNAMIC_SETS in _requested,
            recordings=recordings,
            tuning=tuning,
            sets={0: ranks},
            states={},
            waits=Waits(connections.scope),
            engine=engine,
            view=entry and entry.view,
            begins=entry and entry.begins,
            expected=expected,
        )
        with _pinned(config.thread_affinity, world.local_rank):
            session.connect(0, ranks, communicator)
        undo.pop_all()
    _begin(session)


def _begin(session: Session) -> None:
    _tune_malloc(session.world.local_size)
    global_process_set.ranks = list(session.sets[0])
    sessions.append(session)
    info = read_rank_info()  # the values at process start, not those of a view
    if info.launcher is not Launcher.NONE:
        mark_rank(_identity(info))  # for child processes
    atexit.register(_leave, os.getpid())
    if session.expected is not None:
        return  # this rank is still alone
    config, recordings = session.config, session.recordings
    recordings.open()
    if config.timeline not in ("", DYNAMIC):
        path = Path(config.timeline)
        has_cycles = config.has_timeline_cycles
        recordings.start(path, has_cycles=has_cycles, on_all=True)
    _set_recorders(session)


def _report(config: HorovodConfig, rank_info: RankInfo) -> None:
    if config.log_level is not None:
        _logger.setLevel(config.log_level)
    if rank_info.rank == 0:
        report_ignored(config)
    if rank_info.rank == 0 and rank_info.stray:
        _logger.warning(
            "Ignored the incomplete launcher environment: %s. This process is rank 0 "
            "of %s. Unset the variables, or start the program with ronde run.",
            ", ".join(rank_info.stray),
            rank_info.size,
        )


@cache
def _tune_malloc(local_size: int) -> None:
    """Make malloc keep freed memory, on ranks without an accelerator."""
    if read_malloc_tuning() and not torch.accelerator.is_available():
        thresholds = malloc_thresholds(local_size)
        if thresholds is not None:
            thresholds.apply()


@contextmanager
def _pinned(cores: Sequence[int], local_rank: int) -> Generator[None]:
    """Bind threads started in this block to ``HOROVOD_THREAD_AFFINITY``'s core."""
    before = os.sched_getaffinity(0)
    try:
        if cores:
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
        if cores:
            os.sched_setaffinity(0, before)


def _static_sets(process_sets: Sequence[ProcessSet] | str | None) -> list[ProcessSet]:
    if not isinstance(process_sets, str):
        return list(process_sets or ())
    if process_sets.lower() != _DYNAMIC_SETS:
        raise UsageError(
            f"process_sets must be a list of ProcessSet or {_DYNAMIC_SETS!r}, got "
            f"{process_sets!r}."
        )
    _requested.add(_DYNAMIC_SETS)
    return []


def _check_comm(comm: Sequence[int] | Any, rank_info: RankInfo) -> None:  # noqa: ANN401  mpi4py's
    every = list(range(rank_info.size))
    if comm is None or isinstance(comm, Iterable):
        if list(cast("Iterable[int]", comm or ())) in ([], every):
            return
    elif ProcessSet(comm).ranks == every:
        global_process_set.mpi_comm = comm
        return
    raise UsageError(
        f"comm must be None or all ranks in order, got {comm} with size "
        f"{rank_info.size}. To use only some of the ranks, pass process_sets."
    )


def _tuning_options(config: HorovodConfig, rank: int) -> TuningOptions | None:
    if not config.is_autotuning:
        return None
    log = None
    if config.autotune_log and rank == 0:
        try:
            log = TuningLog(Path(config.autotune_log))
        except OSError as error:
            raise UsageError(
                f"cannot write HOROVOD_AUTOTUNE_LOG={config.autotune_log}: "
                f"{error.strerror}."
            ) from error
    return TuningOptions(
        config.autotune_warmup_samples,
        config.autotune_steps_per_sample,
        config.autotune_max_samples,
        log=log,
    )


def _coordination_options(
    config: HorovodConfig, tuning: TuningOptions | None
) -> CoordinationOptions:
    return CoordinationOptions(
        fusion_threshold_bytes=config.fusion_threshold_bytes,
        tuning=None if "FUSION_THRESHOLD" in config.explicit else tuning,
        gather_time_s=config.cycle_time_s,
        cache_capacity=config.cache_capacity,
        is_group_alone=config.is_group_alone,
        stall_warning_s=config.stall_warning_s,
        stall_shutdown_s=config.stall_shutdown_s,
    )
