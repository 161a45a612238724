"""How the ranks that ``srun`` started on several hosts find rank 0.

Slurm names the step's hosts, rank 0's first, and no port. So all ranks derive the same
ports from the numbers of job and step; rank 0 answers on the first that is free, and
the others try them until they find who proves that he is of their user and step.

Everybody can derive them. Who takes some keeps nobody out: rank 0 goes on to the next,
and the others, who try few at first, soon try all.
"""

import os
import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from ronde.addresses import family_of, is_loopback, source_towards
from ronde.collectives.rendezvous.handshake import await_all, join
from ronde.collectives.store import JobStore, store_beyond
from ronde.errors import CollectiveError, StoreError, WorldError
from ronde.store.authentication import SameUser, dial_network
from ronde.store.protocol import max_connections
from ronde.store.server import serve_network
from ronde.world.environment import read_config_directory, select_variables
from ronde.world.host_lists import expand_list
from ronde.world.rank_info import RankInfo

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_NUM_PORTS = 256
_NUM_AT_FIRST = 4
_NUM_AT_ONCE = 16
_FIRST_PORT, _END_PORT = 16384, 32768
"""Below what Linux gives to outgoing connections, unless it is told otherwise."""
_ANSWER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_PAUSE_PER_PORT_S = 1 / 128
_Place = tuple[str, int]
_CURE = "Set MASTER_ADDR and MASTER_PORT on all ranks."


def meet_in_step(claim: RankInfo, timeout_s: float) -> JobStore:
    """Return a store that all ranks of a step of Slurm's share.

    Args:
        claim: This rank's place.
        timeout_s: How long to wait for the others.

    Raises:
        UsageError: MUNGE does not answer, and no secret file can be used.
        WorldError: Slurm does not say where the step runs, or the hosts' names lead
            nowhere.
        CollectiveError: The others did not come in time.
    """
    first, other = _first_nodes(claim)
    said = select_variables(["SLURM_NODEID"])
    # The own name is not asked for: on many a host it leads to the loopback.
    is_here = claim.rank == 0 or said.get("SLURM_NODEID") == "0"
    addresses = _sources_towards(other) if is_here else _addresses_of(first)
    if not addresses:
        asked, what = (other, "a route to") if is_here else (first, "an address for")
        raise WorldError(
            f"rank {claim.rank} must find {what} {asked}, a host of the step, by its "
            f"name, got none. {_CURE}"
        )
    trust = SameUser(f"slurm {claim.job_id}", read_config_directory())
    if claim.rank == 0:
        return _host(addresses[0], trust, claim, timeout_s)
    return _find(addresses, trust, claim, timeout_s)


def _first_nodes(claim: RankInfo) -> tuple[str, str]:
    """Return the names of rank 0's host and of another."""
    said = select_variables(_NODE_LISTS)
    text = next((said[name] for name in _NODE_LISTS if said.get(name)), "")
    names = expand_list(text, _NODE_LISTS[0])
    if len(names) < 2:
        raise WorldError(
            f"{_NODE_LISTS[0]} must name the hosts of {claim.size} ranks that run on "
            f"several, got {text!r}. Start the program with srun. Or else: {_CURE}"
        )
    return names[0], names[1]


def _addresses_of(name: str) -> tuple[str, ...]:
    """Return the numeric addresses of a host, IPv4 first; none that stay on this."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    addresses = {str(entry[4][0]): None for entry in found}
    others = (a for a in addresses if not is_loopback(a))
    return tuple(sorted(others, key=lambda a: ":" in a))


def _sources_towards(name: str) -> tuple[str, ...]:
    """Return this host's addresses that packets to another host leave by."""
    sources = dict.fromkeys(map(source_towards, _addresses_of(name)))
    return tuple(s for s in sources if s and not is_loopback(s))


def step_ports(job_id: str) -> list[int]:
    """Derive what all ranks of a user's step, and hardly any other's, come to."""
    drawing = random.Random(f"ronde {os.geteuid()} {job_id}")  # noqa: S311  no secret
    return drawing.sample(range(_FIRST_PORT, _END_PORT), _NUM_PORTS)


def _host(address: str, trust: SameUser, claim: RankInfo, timeout_s: float) -> JobStore:
    """Answer on the first port that is free, and wait until all others have joined."""
    listener = _bind_first(address, step_ports(claim.job_id))
    port = listener.getsockname()[1]
    serve_network(listener, trust, max_connections(claim.size))
    store = store_beyond(address, port, trust, timeout_s)
    join(store, claim)
    await_all(store, claim, timeout_s)
    return store


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


def _find(
    addresses: Sequence[str], trust: SameUser, claim: RankInfo, timeout_s: float
) -> JobStore:
    """Try until somebody at a port of rank 0's host proves to be of this step."""
    ends_at = time.monotonic() + timeout_s
    pause_s, num_ports = _FIRST_PAUSE_S, _NUM_AT_FIRST
    ports = step_ports(claim.job_id)
    while time.monotonic() < ends_at:
        places = [(a, port) for port in ports[:num_ports] for a in addresses]
        for address, port in _answering(places, trust):
            store = store_beyond(address, port, trust, timeout_s)
            if join(store, claim):
                return store
        # Many ranks that ask often would keep rank 0's host busy while it starts.
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret
        if pause_s >= _LONGEST_PAUSE_S:
            num_ports = min(2 * num_ports, _NUM_PORTS)
        pause_s = max(min(2 * pause_s, _LONGEST_PAUSE_S), num_ports * _PAUSE_PER_PORT_S)
    raise CollectiveError(
        f"rank 0 must answer at {' or '.join(addresses)} within {timeout_s:g} s, "
        f"but did not answer rank {claim.rank}. See whether it started, whether a "
        "firewall is between, and whether MUNGE runs on both hosts or "
        f"{read_config_directory()} is the same directory there. {_CURE}"
    )


def _answering(places: Sequence[_Place], trust: SameUser) -> list[_Place]:
    """Return the addresses and ports where somebody proves to be of this step.

    All at once: a stranger may take long to say nothing.
    """

    def is_ours(place: _Place) -> bool:
        try:
            dial_network(*place, trust, _ANSWER_S).close()
        except (OSError, StoreError):
            return False
        return True

    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        found = zip(places, threads.map(is_ours, places), strict=True)
        return [place for place, is_there in found if is_there]
