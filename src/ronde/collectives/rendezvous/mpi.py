"""How the ranks that ``mpirun`` started on several hosts find rank 0: MPI tells them.

MPI connects the ranks and names no address. So rank 0 tells its addresses by MPI, all
say which of them they have a route to, and rank 0 listens on the best.
"""

import secrets
import socket
from importlib.util import find_spec

from ronde.addresses import (
    InterfaceAddress,
    choose_address,
    family_of,
    read_interfaces,
    source_towards,
)
from ronde.collectives.communicator import Communicator
from ronde.collectives.objects import all_gather_json, broadcast_json
from ronde.collectives.store import JobStore, store_beyond
from ronde.errors import UsageError, WorldError
from ronde.store.authentication import SharedKey
from ronde.store.protocol import max_connections
from ronde.store.server import serve_network
from ronde.world.environment import network_identity
from ronde.world.rank_info import RankInfo

_CURE = "Set them on all ranks, to rank 0's host and a free port there"


def meet_by_mpi(claim: RankInfo, timeout_s: float) -> JobStore:
    """Return a store that all ranks share, which MPI told them the address of.

    MPI is initialised by this, if the program has not done so before.

    Args:
        claim: This rank's place.
        timeout_s: How long to wait for the others.

    Raises:
        WorldError: MPI cannot be used from here, or the hosts do not reach rank 0's.
        CollectiveError: The others did not come in time.
    """
    try:
        from ronde.collectives.engines.mpi import connect_world

        engine = connect_world(claim.rank, claim.size, timeout_s=timeout_s)
    except UsageError as error:
        if find_spec("mpi4py") is None:
            problem, cure = "mpi4py is not installed", "or type: pip install mpi4py"
        else:
            problem, cure = "it cannot be used", f"or mind this: {error}"
        raise WorldError(
            f"MASTER_ADDR and MASTER_PORT must be set where {claim.size} ranks run on "
            f"several hosts and MPI does not tell them where to meet, as {problem}. "
            f"{_CURE}; {cure}"
        ) from error
    mpi = Communicator(engine)
    address = _agree_on_address(mpi)
    key, port = secrets.token_bytes(32), 0
    if mpi.rank == 0 and address:
        listener = socket.create_server((address, 0), family=family_of(address))
        port = listener.getsockname()[1]
        serve_network(listener, SharedKey(key), max_connections(claim.size))
    # Who reads what MPI carries is of the job, or can do as he likes with it anyway.
    told = broadcast_json(mpi, lambda: [key.hex(), port], 0)
    mpi.close()
    if not address:
        raise WorldError(
            "rank 0's host must have an address that all hosts have a route to, got "
            "none. Set MASTER_ADDR and MASTER_PORT on all ranks to where they reach it."
        )
    trust = SharedKey(bytes.fromhex(told[0]))
    return store_beyond(address, int(told[1]), trust, timeout_s)


def _agree_on_address(mpi: Communicator) -> str:
    """Return the address of rank 0's host that all hosts reach best, or empty."""
    own = [tuple(each) for each in read_interfaces()] if mpi.rank == 0 else []
    candidates = [InterfaceAddress(*e) for e in broadcast_json(mpi, lambda: own, 0)]
    sources = [source_towards(each.address) for each in candidates]
    answers = all_gather_json(mpi, (network_identity(), sources))
    here = answers[0][0]
    others = [
        # One's own address, on another host: a bridge for containers, say.
        ["" if s == c.address else s for s, c in zip(there, candidates, strict=True)]
        for host, there in answers
        if host != here
    ]
    best = choose_address(candidates, others, {})
    return "" if best is None else candidates[best].address
