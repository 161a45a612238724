"""Run a function on several ranks, each a process of its own, for its results.

A fork server that has torch and ronde loaded makes the processes: a rank starts in a
few hundredths of a second. A rank that raises fails the test with that rank's
traceback; one that hangs is killed when the time is up, with its stacks in the message.
The ranks die with the fork server, and that with pytest.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.distributed import TCPStore

from ronde.collectives import Communicator, connect
from ronde.errors import PeerLostError
from ronde.store import listen, serve_locally
from ronde.world import Launcher, RankInfo

PRELOAD = [
    *("torch", "torch._dynamo", "numpy", "cloudpickle", "pytest", "ronde.torch"),
    "tests.frozen",
]
"""The first optimizer imports torch._dynamo, which takes more than a second."""
FIRST_START_S = 60.0
"""Added to the first run's limit, in which the fork server imports torch."""
AFTER_FAILURE_S = 30.0
"""What the others have to end in, once one rank has failed."""
_PR_SET_PDEATHSIG = 1
_has_started: list[bool] = []


class RankFailedError(AssertionError):
    """A rank hung, died, or raised what cannot be pickled."""


@dataclass(frozen=True, slots=True)
class Order:
    """The work of one rank; either ``info`` or ``environment`` is set."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    info: RankInfo | None = None
    connecting: Callable[[RankInfo], Communicator] | None = None
    environment: dict[str, str] | None = None


@dataclass(slots=True)
class Rank:
    """One rank's process."""

    index: int
    process: Any
    connection: Connection
    stacks: Path
    result: Any = None
    error: BaseException | None = None
    is_over: bool = False


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    dying: Collection[int] = (),
    connecting: Callable[[RankInfo], Communicator] | None = None,
) -> list[Any]:
    """Call ``fn(communicator, *args)`` on each rank; return the results by rank.

    Args:
        dying: Ranks that end without a result; theirs is None.
        connecting: Makes the communicator; None connects as every program does.

    Raises:
        Exception: The error of the first rank to fail, with its traceback as a note.
        RankFailedError: A rank hung or died, or its error cannot be pickled.
    """
    # Not torch's store: to log a connection it asks a name server for the loopback's
    # name, which may not answer for seconds.
    with job_store() as store:
        infos = [claim_of(rank, size, store) for rank in range(size)]
        orders = [Order(fn, args, info=each, connecting=connecting) for each in infos]
        return _run(orders, timeout_s, dying)


def run_ranks_bare(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    dying: Collection[int] = (),
    launcher: str = "ronde",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``fn(rank_info, *args)`` on each rank in a launcher's environment.

    Nothing is connected: ``fn`` does that, say by ``ronde.torch.init()``.

    Args:
        dying: Ranks that end without a result; theirs is None.
        launcher: "ronde": this process serves the store, on a unix socket. "torchrun":
            on the port. "plain": rank 0 binds the port.
        environment: Further variables for all ranks.
    """
    further = dict(environment or {})
    store = hosted_store() if launcher == "torchrun" else None
    with ExitStack() as closing:
        if launcher == "ronde":
            further = {"RONDE_STORE": closing.enter_context(job_store())} | further
        port = store.port if store else _free_port()
        orders = [
            Order(
                fn, args, environment=_environment(launcher, rank, size, port) | further
            )
            for rank in range(size)
        ]
        return _run(orders, timeout_s, dying)


@contextmanager
def job_store() -> Generator[str]:
    """Answer for a store as ``ronde run`` does; yield its socket's path."""
    with tempfile.TemporaryDirectory(prefix="ronde-store-") as folder:
        path = Path(folder) / "store"
        server = serve_locally(listen(path), max_clients=256)
        try:
            yield str(path)
        finally:
            server.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def hosted_store() -> TCPStore:
    """Answer on a free port of this process, as torchrun's agent does."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def claim_of(rank: int, size: int, store: str) -> RankInfo:
    """Return a rank of this host, with its rendezvous at a ``job_store``."""
    return RankInfo(
        Launcher.RONDE, rank, size, rank, size, 0, 1, job_id="tests", store=store
    )


def _environment(launcher: str, rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of a rank as ``launcher`` sets them."""
    common = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RONDE_DRIFT": "error",  # only in tests of drift the ranks differ
    }
    if launcher == "plain":
        return common
    elastic = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher == "torchrun"),
    }
    if launcher == "torchrun":
        return common | elastic
    ours = {
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "NODE_RANK": "0",
        "LOCAL_SIZE": str(size),
        "RONDE_JOB_ID": "tests",
        "RONDE_EPOCH": "0",
        "RONDE_COOKIE": "tests",
        "RONDE_HOST": "localhost",
        "RONDE_NODE_RANK": "0",
    }
    return common | elastic | ours


def _run(
    orders: Sequence[Order],
    timeout_s: float,
    dying: Collection[int],
) -> list[Any]:
    """Start a rank for every order, wait for all and leave none behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    if not _has_started:
        timeout_s += FIRST_START_S
        _has_started.append(True)
    deadline = time.monotonic() + timeout_s
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="ronde-stacks-") as folder:
        try:
            for index, order in enumerate(orders):
                stacks = Path(folder) / str(index)
                ranks.append(_start(context, index, order, stacks))
            _collect(ranks, deadline, dying)
        finally:
            for rank in ranks:
                _end(rank)
    failures = [rank for rank in ranks if rank.error is not None]
    if failures:
        # A lost peer is what the others see of the rank that failed first.
        failures.sort(key=lambda rank: isinstance(rank.error, PeerLostError))
        assert failures[0].error is not None
        raise failures[0].error
    return [rank.result for rank in ranks]


def _start(context: Any, index: int, order: Order, stacks: Path) -> Rank:
    """Start one rank's process and hand its order over."""
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_be_rank, args=(theirs, str(stacks)), name=f"rank {index}", daemon=True
    )
    process.start()
    theirs.close()
    try:
        ours.send_bytes(cloudpickle.dumps(order))
    except OSError as error:  # it died at once: _collect tells how
        ours.close()
        raise RankFailedError(f"rank {index} did not start: {error}") from error
    return Rank(index, process, ours, stacks)


def _collect(ranks: list[Rank], deadline: float, dying: Collection[int]) -> None:
    """Wait until every rank is over, or the deadline is, or one failed for long."""
    while waiting := {r.connection: r for r in ranks if not r.is_over}:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                rank.error = RankFailedError(_describe_hang(rank))
            return
        for connection in ready:
            rank = waiting[connection]
            _receive(rank, is_dying=rank.index in dying)
            if rank.error is not None:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)


def _receive(rank: Rank, *, is_dying: bool) -> None:
    """Receive a rank's result, or the way it died."""
    rank.is_over = True
    try:
        rank.result, rank.error = cloudpickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join(AFTER_FAILURE_S)
        if not is_dying:
            code = rank.process.exitcode
            rank.error = RankFailedError(
                f"rank {rank.index} died: exit code {code}\n{_read(rank.stacks)}"
            )


def _describe_hang(rank: Rank) -> str:
    """Return the stacks of a rank that hangs.

    The main thread's first: reading those of running threads may crash.
    """
    if rank.process.is_alive():
        os.kill(rank.process.pid, signal.SIGUSR1)
        os.kill(rank.process.pid, signal.SIGUSR2)
        deadline = time.monotonic() + AFTER_FAILURE_S
        while (
            _read(rank.stacks).count("most recent call first") < 2
            and time.monotonic() < deadline
            and not wait([rank.process.sentinel], 0.05)
        ):
            pass
        wait([rank.process.sentinel], 0.2)  # the rest of it
    return f"rank {rank.index} hung; its stacks:\n{_read(rank.stacks)}"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _end(rank: Rank) -> None:
    """Wait for a rank that is over and kill any other."""
    rank.connection.close()
    if rank.is_over:
        rank.process.join(AFTER_FAILURE_S)
    rank.process.kill()
    rank.process.join()
    rank.process.close()


def _be_rank(connection: Connection, stacks: str) -> None:
    """Run as one rank; the fork server's child starts here."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server ends when all copies of this are closed. A rank that hangs must
    # not hold one: were pytest killed, both would stay.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    torch.set_num_threads(1)
    with Path(stacks).open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        faulthandler.register(signal.SIGUSR2, file)
        reply = _execute(connection)
        connection.send_bytes(reply)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR2)
        faulthandler.disable()


def _execute(connection: Connection) -> bytes:
    """Execute the order; return the pickled pair of result and error."""
    try:
        order: Order = cloudpickle.loads(connection.recv_bytes())
        return cloudpickle.dumps((_call(order), None))
    except BaseException as error:  # noqa: BLE001  a process's outermost line
        error.add_note(traceback.format_exc())
        try:
            reply = cloudpickle.dumps((None, error))
            cloudpickle.loads(reply)
        except Exception:  # noqa: BLE001  a class's own pickling may raise anything
            failure = RankFailedError(traceback.format_exc())
            reply = cloudpickle.dumps((None, failure))
        return reply


def _call(order: Order) -> Any:
    if order.environment is None:
        assert order.info is not None
        connecting = order.connecting or partial(connect, timeout_s=60.0)
        communicator = connecting(order.info)
        result = order.fn(communicator, *order.args)
        communicator.close()
        return result
    from ronde.world import read_rank_info

    os.environ.update(order.environment)  # noqa: TID251  what a launcher does before exec
    return order.fn(read_rank_info(), *order.args)
