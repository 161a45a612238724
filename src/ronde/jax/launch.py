"""Start JAX's own distributed runtime with the ranks of the job.

Importing this module lets ``jax.distributed.initialize()`` without arguments find the
ranks that ``ronde run`` started. Rank 0 publishes a port in the job's store, or to the
session, if there is one. JAX accepts no bound socket, but it shares ports
(``SO_REUSEPORT``), so rank 0 keeps the port bound by a socket that does not listen.
"""

import socket
from contextlib import suppress
from importlib import import_module
from typing import Any, cast

from ronde.addresses import family_of
from ronde.collectives.rendezvous import open_store
from ronde.jax.ffi import jax
from ronde.session.operations import broadcast_object
from ronde.session.session import is_initialized
from ronde.world import Launcher, RankInfo, read_rank_info

_KEY = "jax_coordinator"
_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 300.0


def initialize_distributed() -> None:
    """Call ``jax.distributed.initialize()`` with the ranks of the session."""
    info = read_rank_info()
    address = _agree(info, _TIMEOUT_S)
    jax.distributed.initialize(
        address,
        info.size,
        info.rank,
        local_device_ids=[info.local_rank],
        coordinator_bind_address=address if info.rank == 0 else None,
    )


def _agree(info: RankInfo, timeout_s: float) -> str:
    """Return the coordinator's address and port, equal on all ranks; collective."""
    own = _own_address(info) if info.rank == 0 else ""
    if is_initialized():
        return broadcast_object(own, 0, _KEY)
    store = open_store(info, timeout_s)
    if info.rank == 0:
        store.set(_KEY, own)
    return store.get(_KEY).decode()


def _own_address(info: RankInfo) -> str:
    """Return an address of rank 0 that the others reach, with a reserved port."""
    host = _LOOPBACK
    if info.local_size < info.size and info.meeting is not None:
        host = info.meeting.address
    elif info.local_size < info.size:
        host = socket.gethostname()
    with suppress(OSError):
        host = cast("str", socket.getaddrinfo(host, 0)[0][4][0])
    family = family_of(host)
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((host, 0))
    port = reserved.getsockname()[1]
    reserved.detach()  # bound until this process ends
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def register_cluster() -> None:
    """Register the ranks of ``ronde run`` with JAX, which has no public way to."""
    try:
        base: Any = import_module("jax._src.clusters").ClusterEnv
    except (ImportError, AttributeError):
        return

    # JAX keeps a list of its subclasses.
    class RondeCluster(base):  # pyright: ignore[reportUnusedClass]
        name = "ronde"

        @classmethod
        def is_env_present(cls) -> bool:
            return read_rank_info().launcher is Launcher.RONDE

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None, override_coordinator_port: str | None
        ) -> str:
            address = _agree(read_rank_info(), timeout_secs or _TIMEOUT_S)
            if override_coordinator_port is None:
                return address
            return f"{address.rpartition(':')[0]}:{override_coordinator_port}"

        @classmethod
        def get_process_count(cls) -> int:
            return read_rank_info().size

        @classmethod
        def get_process_id(cls) -> int:
            return read_rank_info().rank

        @classmethod
        def get_local_process_id(cls) -> int:
            return read_rank_info().local_rank


register_cluster()
