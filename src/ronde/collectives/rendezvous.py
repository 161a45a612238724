"""How the ranks of a job find one store.

Ranks of one host that no launcher of ours started: rank 0 answers on a unix socket in a
directory that only this user can enter. The socket's name comes from the process that
launched the ranks, so jobs do not mix.

Slurm names the step's hosts, rank 0's first, and no port. So all ranks derive the same
ports from the numbers of job and step; rank 0 answers on the first that is free, and
the others try few at first, then all, until one proves to be of their user and step.
Who takes some of the ports keeps nobody out.

MPI connects the ranks and names no address. So rank 0 sends its addresses by MPI, all
answer which of them they have a route to, and rank 0 listens on the best.
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
from ronde.collectives.store import JobStore, await_all, join, store_at, store_beyond
from ronde.errors import CollectiveError, StoreError, UsageError, WorldError
from ronde.processes import read_stat
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
}  # where the rank is; in ``RANK`` by the other launchers
_IS_EXITING = 0x4  # ``PF_EXITING``: no environment, but still children
_EXITING_S = 3.0  # till it hands its children on, unless threads go on
_ENDING_S = 10.0  # how long ancestors may go on ending, one after the other
_POLL_S = 0.02
_SOCKET = "ronde/socket"
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_NUM_PORTS, _NUM_AT_FIRST, _NUM_AT_ONCE = 256, 4, 16
_FIRST_PORT, _END_PORT = 16384, 32768  # below those of outgoing connections
_ANSWER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PAUSE_PER_PORT_S = 1 / 128
_CURE = "Set MASTER_ADDR and MASTER_PORT on all ranks."
_Place = tuple[str, int]
_calls: dict[str, "itertools.count[int]"] = {}
"""Of the job, or view of one, that this process is part of."""


def meet(info: RankInfo, timeout_s: float, scope: AbortScope | None = None) -> Store:
    """Return a store that all ranks of a job share, empty under the keys used here.

    Collective: the n-th call of one rank meets the n-th call of all others, under one
    ``job_id``. With a ``scope`` the store is of the launcher and ends with that.

    Raises:
        UsageError: On Slurm: no secret file can be used.
        WorldError: The ranks are on several hosts, and it is unknown where to meet.
        CollectiveError: The others did not come in time, or the port is in use.
    """
    with ErrorContext("meeting", info.rank, info.size, timeout_s):
        if scope is not None and info.store:
            scope.store = store = _open_launchers(info, timeout_s, scope)
        else:
            store = _store_of(info, timeout_s)
    attempt = info.meeting.attempt if info.meeting else 0
    if info.job_id not in _calls:
        _calls.clear()
        _calls[info.job_id] = itertools.count()
    call = next(_calls[info.job_id])
    return PrefixStore(f"ronde/{info.job_id}/{attempt}/{call}", store)


@functools.cache
def _store_of(info: RankInfo, timeout_s: float) -> Store:
    """Open a job's store and keep it: the next meeting must not find it closing."""
    if info.store:
        return _open_launchers(info, timeout_s)
    if info.meeting is not None:
        return _open_at(info.meeting, info.rank, timeout_s)
    if info.local_size == info.size:
        return _meet_on_host(info, timeout_s)
    if info.launcher is Launcher.SLURM:
        return _meet_in_step(info, timeout_s)
    if info.launcher in (Launcher.OPEN_MPI, Launcher.PMI):
        return _meet_by_mpi(info, timeout_s)
    raise WorldError(
        f"MASTER_ADDR and MASTER_PORT must be set where {info.size} ranks run on "
        f"several hosts, got neither from {info.launcher}. Set them on all ranks, to "
        "rank 0's host and to a free port there."
    )


def _open_launchers(
    info: RankInfo, timeout_s: float, scope: AbortScope | None = None
) -> JobStore:
    """Open what the launcher answers for: a socket here, or a port that wants a key."""
    place, _, key_file = info.store.partition(" ")
    if not key_file:
        is_spread = info.local_size < info.size
        address = info.meeting.address if is_spread and info.meeting else ""
        return store_at(place, timeout_s, address, scope)
    host, _, port = place.rpartition(":")
    key = SharedKey(Path(key_file).read_bytes())
    return store_beyond(host, int(port), key, timeout_s, scope)


def _open_at(meeting: Meeting, rank: int, timeout_s: float) -> Store:
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
            f"MASTER_PORT must be free on rank 0's host, got {meeting.port}, which "
            "another process listens on. Choose another port for all ranks."
        ) from error


# Ranks of one host.


def find_launcher(info: RankInfo) -> tuple[int, int]:
    """Return the nearest ancestor that is not part of this rank: pid and start time.

    A pid may be used again. Both are 0 for one outside of this container.
    """
    # Shells and wrappers between launcher and rank have the rank's environment; the
    # launcher has not, or it is another user's and hides its own.
    begun = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        try:
            return _find_launcher(info, is_late=waited_s > _EXITING_S)
        except (FileNotFoundError, ProcessLookupError):
            if waited_s > _ENDING_S:
                raise
            # An ancestor has ended. Its children have another parent now: look again.
            os.sched_yield()


def _find_launcher(info: RankInfo, *, is_late: bool) -> tuple[int, int]:
    pid = os.getppid()
    while pid > 1 and _is_of_rank(pid, info):
        pid = int(read_stat(pid)[2])
    if pid == 0:
        return 0, 0
    _, state, *fields = read_stat(pid)
    if (state in "ZX" or int(fields[5]) & _IS_EXITING) and not is_late:
        raise ProcessLookupError(pid)
    return pid, int(fields[18])


def _is_of_rank(pid: int, info: RankInfo) -> bool:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:
        return False
    place = f"{_RANK_VARIABLES.get(info.launcher, 'RANK')}={info.rank}".encode()
    job = f"={info.job_id}".encode()
    # A launcher that itself is a rank of another job may have the same number there.
    return place in entries and (
        not info.job_id or any(entry.endswith(job) for entry in entries)
    )


def _meet_on_host(info: RankInfo, timeout_s: float) -> JobStore:
    name = socket_name(info)
    if info.rank == 0:
        return _host_here(info, name, timeout_s)
    ends_at = time.monotonic() + timeout_s
    while time.monotonic() < ends_at:
        for directory in local_socket.own_directories(socket_prefix()):
            store = join_at(str(directory / name), info, timeout_s)
            if store is not None:
                return store
        time.sleep(_POLL_S)
    raise CollectiveError(
        f"rank 0 must answer on this host within {timeout_s:g} s, but did not answer "
        f"rank {info.rank} in {local_socket.temporary_directory()}. See whether it "
        "started on this host; if it runs elsewhere, set MASTER_ADDR and MASTER_PORT "
        "on all ranks."
    )


def socket_name(info: RankInfo) -> str:
    """Name the socket after the launcher's process, which all ranks descend from."""
    pid, started_at = find_launcher(info)
    identity = f"{boot_identity()} {pid} {started_at} {info.job_id}"
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def socket_prefix() -> str:
    """Return how rank 0's directory begins; others may take names they can guess."""
    return f"ronde-ranks-{os.geteuid()}-"


def join_at(path: str, info: RankInfo, timeout_s: float) -> JobStore | None:
    """Join the store behind a socket; None where there is none, or another's."""
    try:
        local_socket.dial(path, timeout_s).close()
    except OSError:
        return None
    store = store_at(path, timeout_s)
    if not join(store, info):
        return None
    # The name that ranks look for may soon be another start's.
    return store_at(store.get(_SOCKET).decode(), timeout_s)


def _host_here(info: RankInfo, name: str, timeout_s: float) -> JobStore:
    """Answer for a store until this process ends; wait until all have joined."""
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
        if os.getpid() == own_pid:  # and not that of a process it has forked
            local_socket.remove(directory)
            server.close()

    atexit.register(clean_up)
    store = store_at(str(directory / end), timeout_s)
    store.set(_SOCKET, str(directory / end))
    join(store, info)
    # For ranks to find, until all have come.
    (directory / name).hardlink_to(directory / end)
    try:
        await_all(store, info, timeout_s)
    finally:
        (directory / name).unlink(missing_ok=True)
    return store


# Slurm's ranks on several hosts.


def _meet_in_step(info: RankInfo, timeout_s: float) -> JobStore:
    lists = select_variables(_NODE_LISTS)
    text = next((lists[name] for name in _NODE_LISTS if lists.get(name)), "")
    names = expand_list(text, _NODE_LISTS[0])
    if len(names) < 2:
        raise WorldError(
            f"{_NODE_LISTS[0]} must name the hosts of {info.size} ranks that run on "
            f"several, got {text!r}. Start the program with srun. Or else: {_CURE}"
        )
    first, other = names[:2]
    # The own name is not looked up: on many a host it leads to the loopback.
    node_id = select_variables(["SLURM_NODEID"]).get("SLURM_NODEID")
    if info.rank == 0 or node_id == "0":
        # This host's addresses that packets to another host leave by.
        sources = dict.fromkeys(map(source_towards, _addresses_of(other)))
        addresses = tuple(s for s in sources if s and not is_loopback(s))
        wanted = f"a route to {other}"
    else:
        addresses, wanted = _addresses_of(first), f"an address for {first}"
    if not addresses:
        raise WorldError(
            f"rank {info.rank} must find {wanted}, a host of the step, by its name, "
            f"got none. {_CURE}"
        )
    key = user_key(f"slurm {info.job_id}", read_config_directory())
    if info.rank != 0:
        return _find_step(addresses, key, info, timeout_s)
    # Answer on the first port that is free, and wait until all others have joined.
    listener = _bind_first(addresses[0], step_ports(info.job_id))
    port = listener.getsockname()[1]
    serve_network(listener, key, max_connections(info.size))
    store = store_beyond(addresses[0], port, key, timeout_s)
    join(store, info)
    await_all(store, info, timeout_s)
    return store


def _addresses_of(name: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, IPv4 first; none that stay on this."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = {str(entry[4][0]): None for entry in found}
    others = (a for a in addresses if not is_loopback(a))
    return tuple(sorted(others, key=lambda a: ":" in a))


def step_ports(job_id: str) -> list[int]:
    """Derive what all ranks of a user's step, and hardly any others, come to."""
    drawing = random.Random(f"ronde {os.geteuid()} {job_id}")  # noqa: S311  no secret
    return drawing.sample(range(_FIRST_PORT, _END_PORT), _NUM_PORTS)


def _bind_first(address: str, ports: Sequence[int]) -> socket.socket:
    listener = socket.socket(family_of(address))
    for port in ports:
        with suppress(OSError):
            listener.bind((address, port))
            # Two may bind a port and one of them listen.
            listener.listen(128)
            return listener
    listener.close()
    raise CollectiveError(
        f"one of {len(ports)} ports between {_FIRST_PORT} and {_END_PORT} must be free "
        f"on {address}, but all are in use. {_CURE}"
    )


def _find_step(
    addresses: Sequence[str], key: SharedKey, info: RankInfo, timeout_s: float
) -> JobStore:
    """Try until somebody at a port of rank 0's host proves to be of this step."""
    ends_at = time.monotonic() + timeout_s
    pause_s, num_ports = _FIRST_PAUSE_S, _NUM_AT_FIRST
    ports = step_ports(info.job_id)
    while time.monotonic() < ends_at:
        places = [(a, port) for port in ports[:num_ports] for a in addresses]
        for address, port in _answering(places, key):
            store = store_beyond(address, port, key, timeout_s)
            if join(store, info):
                return store
        # Many ranks that dial often would keep rank 0's host busy while it starts.
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret
        if pause_s >= _LONGEST_PAUSE_S:
            num_ports = min(2 * num_ports, _NUM_PORTS)
        pause_s = max(min(2 * pause_s, _LONGEST_PAUSE_S), num_ports * _PAUSE_PER_PORT_S)
    raise CollectiveError(
        f"rank 0 must answer at {' or '.join(addresses)} within {timeout_s:g} s, "
        f"but did not answer rank {info.rank}. See whether it started, whether a "
        f"firewall is between, and whether {read_config_directory() / 'secret'} is "
        "the same file on both hosts: copy it, or set XDG_CONFIG_HOME to a directory "
        f"that they share. {_CURE}"
    )


def _answering(places: Sequence[_Place], key: SharedKey) -> list[_Place]:
    """Return where somebody proves to be of this step; a stranger may take long."""

    def is_ours(place: _Place) -> bool:
        try:
            dial_network(*place, key, _ANSWER_S).close()
        except (OSError, StoreError):
            return False
        return True

    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        found = zip(places, threads.map(is_ours, places), strict=True)
        return [place for place, is_there in found if is_there]


# Ranks of mpirun on several hosts.


def _meet_by_mpi(info: RankInfo, timeout_s: float) -> JobStore:
    try:
        from ronde.collectives.engines.mpi import connect_world

        engine = connect_world(info.rank, info.size, timeout_s=timeout_s)
    except UsageError as error:
        if find_spec("mpi4py") is None:
            problem, cure = "mpi4py is not installed", "or type: pip install mpi4py"
        else:
            problem, cure = "it cannot be used", f"or mind this: {error}"
        raise WorldError(
            f"MASTER_ADDR and MASTER_PORT must be set where {info.size} ranks run on "
            f"several hosts and MPI does not tell them where to meet, as {problem}. "
            f"Set them on all ranks, to rank 0's host and a free port there; {cure}"
        ) from error
    mpi = Communicator(engine)
    address = _agree_on_address(mpi)
    own_key, port = secrets.token_bytes(32), 0
    if mpi.rank == 0 and address:
        listener = socket.create_server((address, 0), family=family_of(address))
        port = listener.getsockname()[1]
        serve_network(listener, SharedKey(own_key), max_connections(info.size))
    # Who reads what MPI carries is of the job, or can do as he likes with it anyway.
    shared_key, port = broadcast_json(mpi, lambda: [own_key.hex(), port], 0)
    mpi.close()
    if not address:
        raise WorldError(
            "rank 0's host must have an address that all hosts have a route to, got "
            "none. Set MASTER_ADDR and MASTER_PORT on all ranks to where they reach it."
        )
    key = SharedKey(bytes.fromhex(shared_key))
    return store_beyond(address, int(port), key, timeout_s)


def _agree_on_address(mpi: Communicator) -> str:
    own = [tuple(each) for each in read_interfaces()] if mpi.rank == 0 else []
    candidates = [InterfaceAddress(*e) for e in broadcast_json(mpi, lambda: own, 0)]
    sources = [source_towards(each.address) for each in candidates]
    answers = all_gather_json(mpi, (network_identity(), sources))
    others = [
        # One's own address, on another host: a bridge for containers, say.
        ["" if s == c.address else s for s, c in zip(there, candidates, strict=True)]
        for host, there in answers
        if host != answers[0][0]
    ]
    best = choose_address(candidates, others, {})
    return "" if best is None else candidates[best].address
