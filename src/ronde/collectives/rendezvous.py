"""Rendezvous: connect all ranks of a job to one store.

``ronde run`` and torchrun give the store's address. With other launchers on one host,
rank 0 serves the store on a unix socket in a directory that only this user can enter.
The socket is named after the process that launched the ranks, so that jobs do not mix.

Slurm gives the hosts of a step, rank 0's first, but no port. All ranks derive the same
list of ports from the job and step numbers. Rank 0 listens on the first free one; the
others try the ports until a server proves to belong to their user and step. Another
user who occupies some of the ports cannot block the rendezvous.

MPI connects the ranks but gives no address. Rank 0 sends its addresses by MPI, every
rank answers which of them it has a route to, and rank 0 listens on the best.
"""

import atexit
import functools
import hashlib
import itertools
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from torch.distributed import PrefixStore, Store, TCPStore

from ronde.addresses import (
    InterfaceAddress,
    choose_address,
    family_of,
    is_loopback,
    read_interfaces,
    source_towards,
)
from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import ErrorContext
from ronde.collectives.objects import all_gather_json, broadcast_json
from ronde.collectives.scope import AbortScope
from ronde.collectives.store import JobStore, await_all, join, remote_store, store_at
from ronde.errors import CollectiveError, StoreError, UsageError, WorldError
from ronde.processes import ProcessStat
from ronde.store import local_socket
from ronde.store.authentication import SharedKey, dial_network, user_key
from ronde.store.protocol import max_connections
from ronde.store.server import serve_locally, serve_network
from ronde.world import Launcher, Meeting, RankInfo
from ronde.world.environment import (
    boot_identity,
    network_identity,
    read_config_directory,
    select_variables,
)
from ronde.world.host_lists import expand_list

_RANK_VARIABLES = {
    Launcher.HOROVOD: "HOROVOD_RANK",
    Launcher.OPEN_MPI: "OMPI_COMM_WORLD_RANK",
    Launcher.PMI: "PMI_RANK",
    Launcher.SLURM: "SLURM_PROCID",
}  # other launchers set ``RANK``
_EXITING_S = 3.0  # limit for an exiting process to lose its children
_ENDING_S = 10.0  # several ancestors may exit, one after the other
_POLL_S = 0.02
_SOCKET = "ronde/socket"
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_NUM_PORTS, _NUM_AT_FIRST, _NUM_AT_ONCE = 256, 4, 16
_FIRST_PORT, _END_PORT = 16384, 32768  # below the ports of outgoing connections
_ANSWER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PAUSE_PER_PORT_S = 1 / 128
_CURE = "Set MASTER_ADDR and MASTER_PORT on all ranks."
_calls: dict[str, "itertools.count[int]"] = {}
"""Counters of the calls of ``open_store``, for the current job or elastic view."""


def open_store(
    info: RankInfo, timeout_s: float, scope: AbortScope | None = None
) -> Store:
    """Return a store that all ranks of a job share; collective.

    For one ``job_id``, the n-th call on every rank returns the same store, which has no
    keys yet. If the launcher serves the store, the connection is closed when ``scope``
    is aborted.

    Raises:
        UsageError: Slurm's ranks have no usable secret file.
        WorldError: The ranks are on several hosts without a rendezvous address.
        CollectiveError: Not all ranks joined in time, or the port is in use.
    """
    with ErrorContext("rendezvous", info.rank, info.size, timeout_s):
        if scope is not None and info.store:
            scope.store = store = _launcher_store(info, timeout_s, scope)
        else:
            store = _shared_store(info, timeout_s)
    attempt = info.meeting.attempt if info.meeting else 0
    if info.job_id not in _calls:
        _calls.clear()
        _calls[info.job_id] = itertools.count()
    call = next(_calls[info.job_id])
    return PrefixStore(f"ronde/{info.job_id}/{attempt}/{call}", store)


@functools.cache
def _shared_store(info: RankInfo, timeout_s: float) -> Store:
    # Cached: the next rendezvous must not find the store closing.
    if info.store:
        return _launcher_store(info, timeout_s)
    if info.meeting is not None:
        return _tcp_store(info.meeting, info.rank, timeout_s)
    if info.local_size == info.size:
        return _host_store(info, timeout_s)
    if info.launcher is Launcher.SLURM:
        return _slurm_store(info, timeout_s)
    if info.launcher in (Launcher.OPEN_MPI, Launcher.PMI):
        return _mpi_store(info, timeout_s)
    raise WorldError(
        f"{info.size} ranks run on several hosts, but {info.launcher} gives them no "
        "rendezvous address. Set MASTER_ADDR and MASTER_PORT on all ranks, to rank 0's "
        "host and to a free port there."
    )


def _launcher_store(
    info: RankInfo, timeout_s: float, scope: AbortScope | None = None
) -> JobStore:
    """Connect to the launcher's store by its unix socket, or its port and key file."""
    target, _, key_file = info.store.partition(" ")
    if not key_file:
        is_spread = info.local_size < info.size
        address = info.meeting.address if is_spread and info.meeting else ""
        return store_at(target, timeout_s, address, scope)
    host, _, port = target.rpartition(":")
    key = SharedKey(Path(key_file).read_bytes())
    return remote_store(host, int(port), key, timeout_s, scope)


def _tcp_store(meeting: Meeting, rank: int, timeout_s: float) -> Store:
    try:
        return TCPStore(
            meeting.address,
            meeting.port,
            is_master=rank == 0 and not meeting.is_hosted,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # The program's own init_process_group() may share the server.
            multi_tenant=True,
        )
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise CollectiveError(
            f"MASTER_PORT {meeting.port} is in use by another process on rank 0's "
            "host. Choose another port for all ranks."
        ) from error


# Ranks of one host.


def find_launcher(info: RankInfo) -> tuple[int, int]:
    """Return pid and start time of the nearest ancestor that is not part of this rank.

    Both are 0 if that ancestor is outside this container.
    """
    # Shells and wrappers between launcher and rank have the rank's environment. The
    # launcher does not, or belongs to another user and hides its own.
    begun = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        try:
            return _find_launcher(info, is_late=waited_s > _EXITING_S)
        except (FileNotFoundError, ProcessLookupError):
            if waited_s > _ENDING_S:
                raise
            # An ancestor has ended, so its children have another parent now.
            os.sched_yield()


def _find_launcher(info: RankInfo, *, is_late: bool) -> tuple[int, int]:
    pid = os.getppid()
    while pid > 1 and _has_rank_variables(pid, info):
        pid = ProcessStat.read(pid).parent
    if pid == 0:
        return 0, 0
    process = ProcessStat.read(pid)
    if (process.is_zombie or process.is_exiting) and not is_late:
        raise ProcessLookupError(pid)
    return pid, process.started


def _has_rank_variables(pid: int, info: RankInfo) -> bool:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return False
    rank = f"{_RANK_VARIABLES.get(info.launcher, 'RANK')}={info.rank}".encode()
    job = f"={info.job_id}".encode()
    # The launcher may itself be a rank of another job, even with the same number.
    return rank in entries and (
        not info.job_id or any(entry.endswith(job) for entry in entries)
    )


def _host_store(info: RankInfo, timeout_s: float) -> JobStore:
    name = socket_name(info)
    if info.rank == 0:
        return _serve_host_store(info, name, timeout_s)
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        for directory in local_socket.own_directories(socket_prefix()):
            store = join_at(str(directory / name), info, timeout_s)
            if store is not None:
                return store
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank {info.rank} found no socket of rank 0 in "
        f"{local_socket.temporary_directory()} within {timeout_s:g} s. Check that "
        "rank 0 started on this host; if it runs elsewhere, set MASTER_ADDR and "
        "MASTER_PORT on all ranks."
    )


def socket_name(info: RankInfo) -> str:
    """Derive a socket name from the launcher's process, the ranks' common ancestor."""
    pid, started_at = find_launcher(info)
    identity = f"{boot_identity()} {pid} {started_at} {info.job_id}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def socket_prefix() -> str:
    # The rest of the name is random, so that no other user can occupy it.
    return f"ronde-ranks-{os.geteuid()}-"


def join_at(path: str, info: RankInfo, timeout_s: float) -> JobStore | None:
    """Join the store at a socket; return None if it is absent or of other ranks."""
    try:
        local_socket.dial(path, timeout_s).close()
    except OSError:
        return None
    store = store_at(path, timeout_s)
    if not join(store, info):
        return None
    # Another start of the job may soon use the first name.
    return store_at(store.get(_SOCKET).decode(), timeout_s)


def _serve_host_store(info: RankInfo, name: str, timeout_s: float) -> JobStore:
    """Serve a store until this process ends; return once all ranks have joined."""
    for stale in local_socket.own_directories(socket_prefix()):
        if local_socket.remove_stale(stale):
            local_socket.remove(stale)
    end = secrets.token_hex(8)
    directory = local_socket.temporary_directory() / f"{socket_prefix()}{end}"
    directory.mkdir(mode=0o700)
    server = serve_locally(
        local_socket.listen(directory / end), max_connections(info.size)
    )
    own_pid = os.getpid()

    def clean_up() -> None:
        if os.getpid() == own_pid:  # not a forked child
            local_socket.remove(directory)
            server.close()

    atexit.register(clean_up)
    store = store_at(str(directory / end), timeout_s)
    store.set(_SOCKET, str(directory / end))
    join(store, info)
    # The name for which the other ranks look.
    (directory / name).hardlink_to(directory / end)
    try:
        await_all(store, info, timeout_s)
    finally:
        (directory / name).unlink(missing_ok=True)
    return store


# Slurm's ranks on several hosts.


def _slurm_store(info: RankInfo, timeout_s: float) -> JobStore:
    lists = select_variables(_NODE_LISTS)
    text = next((lists[name] for name in _NODE_LISTS if lists.get(name)), "")
    names = expand_list(text, _NODE_LISTS[0])
    if len(names) < 2:
        raise WorldError(
            f"{info.size} ranks run on several hosts, but {_NODE_LISTS[0]} is "
            f"{text!r}. Start the program with srun. Otherwise: {_CURE}"
        )
    first, other = names[:2]
    # The host's own name is not resolved: it often leads to the loopback.
    node_id = select_variables(["SLURM_NODEID"]).get("SLURM_NODEID")
    if info.rank == 0 or node_id == "0":
        # The source addresses of packets to the other host.
        sources = dict.fromkeys(map(source_towards, _addresses_of(other)))
        addresses = tuple(s for s in sources if s and not is_loopback(s))
        wanted = f"route to {other}"
    else:
        addresses, wanted = _addresses_of(first), f"address for {first}"
    if not addresses:
        raise WorldError(
            f"rank {info.rank} found no {wanted}, a host of the Slurm step. {_CURE}"
        )
    key = user_key(f"slurm {info.job_id}", read_config_directory())
    if info.rank != 0:
        return _join_step(addresses, key, info, timeout_s)
    listener = _bind_first(addresses[0], step_ports(info.job_id))
    port = listener.getsockname()[1]
    serve_network(listener, key, max_connections(info.size))
    store = remote_store(addresses[0], port, key, timeout_s)
    join(store, info)
    await_all(store, info, timeout_s)
    return store


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = {str(entry[4][0]): None for entry in found}
    others = (a for a in addresses if not is_loopback(a))
    return tuple(sorted(others, key=lambda a: ":" in a))


def step_ports(job_id: str) -> list[int]:
    """Return the ports of a user's step in the order to try, equal on all its ranks."""
    drawing = random.Random(f"ronde {os.geteuid()} {job_id}")  # noqa: S311  no secret
    return drawing.sample(range(_FIRST_PORT, _END_PORT), _NUM_PORTS)


def _bind_first(address: str, ports: Sequence[int]) -> socket.socket:
    listener = socket.socket(family_of(address))
    for port in ports:
        with suppress(OSError):
            listener.bind((address, port))
            # Two processes may bind a port, but only one of them can listen.
            listener.listen(128)
            return listener
    listener.close()
    raise CollectiveError(
        f"all {len(ports)} ports of this job between {_FIRST_PORT} and {_END_PORT} are "
        f"in use on {address}. {_CURE}"
    )


def _join_step(
    addresses: Sequence[str], key: SharedKey, info: RankInfo, timeout_s: float
) -> JobStore:
    ends_at = time.monotonic() + timeout_s
    pause_s, num_ports = _FIRST_PAUSE_S, _NUM_AT_FIRST
    ports = step_ports(info.job_id)
    while time.monotonic() < ends_at:
        targets = [(a, port) for port in ports[:num_ports] for a in addresses]
        for address, port in _authenticated(targets, key):
            store = remote_store(address, port, key, timeout_s)
            if join(store, info):
                return store
        # Many ranks that connect often would slow down the start of rank 0's host.
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret
        if pause_s >= _LONGEST_PAUSE_S:
            num_ports = min(2 * num_ports, _NUM_PORTS)
        pause_s = max(min(2 * pause_s, _LONGEST_PAUSE_S), num_ports * _PAUSE_PER_PORT_S)
    raise CollectiveError(
        f"rank {info.rank} got no answer from rank 0 at {' or '.join(addresses)} "
        f"within {timeout_s:g} s. Check that rank 0 started, that no firewall blocks "
        f"ports {_FIRST_PORT} to {_END_PORT}, and that "
        f"{read_config_directory() / 'secret'} is the same file on both hosts: copy "
        "it, or set XDG_CONFIG_HOME to a directory that they share. " + _CURE
    )


def _authenticated(
    targets: Sequence[tuple[str, int]], key: SharedKey
) -> list[tuple[str, int]]:
    """Try many servers at once; return those that prove knowledge of the key."""

    def is_ours(target: tuple[str, int]) -> bool:
        try:
            dial_network(*target, key, _ANSWER_S).close()
        except (OSError, StoreError):
            return False
        return True

    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        return list(itertools.compress(targets, threads.map(is_ours, targets)))


# Ranks of mpirun on several hosts.


def _mpi_store(info: RankInfo, timeout_s: float) -> JobStore:
    try:
        from ronde.collectives.engines.mpi import connect_world

        engine = connect_world(info.rank, info.size, timeout_s=timeout_s)
    except UsageError as error:
        if find_spec("mpi4py") is None:
            problem, cure = "mpi4py is not installed", "or type: pip install mpi4py"
        else:
            problem, cure = "MPI cannot be used", f"or fix this: {error}"
        raise WorldError(
            f"{info.size} ranks run on several hosts, but {problem}. Set MASTER_ADDR "
            "and MASTER_PORT on all ranks, to rank 0's host and a free port there, "
            f"{cure}"
        ) from error
    mpi = Communicator(engine)
    address = _agree_on_address(mpi)
    own_key, port = secrets.token_bytes(32), 0
    if mpi.rank == 0 and address:
        listener = socket.create_server((address, 0), family=family_of(address))
        port = listener.getsockname()[1]
        serve_network(listener, SharedKey(own_key), max_connections(info.size))
    # A process that can read MPI's messages can control the job in any case.
    shared_key, port = broadcast_json(mpi, lambda: [own_key.hex(), port], 0)
    mpi.close()
    if not address:
        raise WorldError(
            "rank 0's host has no address to which all other hosts have a route. Set "
            "MASTER_ADDR and MASTER_PORT on all ranks, to an address they can reach."
        )
    key = SharedKey(bytes.fromhex(shared_key))
    return remote_store(address, int(port), key, timeout_s)


def _agree_on_address(mpi: Communicator) -> str:
    own = [tuple(each) for each in read_interfaces()] if mpi.rank == 0 else []
    candidates = [InterfaceAddress(*e) for e in broadcast_json(mpi, lambda: own, 0)]
    sources = [source_towards(each.address) for each in candidates]
    answers = all_gather_json(mpi, (network_identity(), sources))
    others = [
        # An address that both hosts have, such as a container bridge's, is not used.
        ["" if s == c.address else s for s, c in zip(there, candidates, strict=True)]
        for host, there in answers
        if host != answers[0][0]
    ]
    best = choose_address(candidates, others, {})
    return "" if best is None else candidates[best].address
