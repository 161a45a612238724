"""How the ranks that ``srun`` started on several hosts find rank 0.

Slurm names the step's hosts, rank 0's first, and no port. So all ranks derive the same
few ports from the numbers of job and step; rank 0 listens on the first that is free,
and the others try them until they find who calls the job's roll.
"""

import hashlib
import os
import random
import socket
import time
from dataclasses import dataclass

from torch.distributed import Store

from ronde.addresses import family_of, is_loopback, source_towards
from ronde.collectives.roll_call import answer_roll, call_roll
from ronde.errors import CollectiveError, WorldError
from ronde.world.host_lists import expand_list
from ronde.world.value import Claim
from ronde.world.variables import select_variables

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_NUM_PORTS = 4
_FIRST_PORT, _END_PORT = 16384, 32768
"""Below what Linux gives to outgoing connections, unless it is told otherwise."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_CURE = "Set MASTER_ADDR and MASTER_PORT on all ranks."


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rank 0 may be found.

    Attributes:
        addresses: Of rank 0's host.
        ports: Those to try, in this order.
        token: What it knows the step by.
    """

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    token: str


def meet_in_step(claim: Claim, timeout_s: float) -> Store:
    """Return a store that all ranks of a step of Slurm's share.

    Args:
        claim: This rank's place.
        timeout_s: How long to wait for the others.

    Raises:
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
    place = _Place(addresses, *_ports_and_token(claim.job_id))
    if claim.rank == 0:
        return _host(place, claim, timeout_s)
    return _join(place, claim, timeout_s)


def _first_nodes(claim: Claim) -> tuple[str, str]:
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


def _ports_and_token(job_id: str) -> tuple[tuple[int, ...], str]:
    """Derive what all ranks of a user's step, and hardly any other's, come to."""
    drawing = random.Random(f"ronde {os.getuid()} {job_id}")  # noqa: S311  no secret
    ports = tuple(drawing.sample(range(_FIRST_PORT, _END_PORT), _NUM_PORTS))
    token = hashlib.sha256(f"ronde {os.getuid()} {job_id}".encode()).hexdigest()
    return ports, token


def _host(place: _Place, claim: Claim, timeout_s: float) -> Store:
    """Listen on the first port that is free, and wait until all others have joined."""
    address = place.addresses[0]
    with socket.socket(family_of(address)) as listener:
        for port in place.ports:
            try:
                listener.bind((address, port))
            except OSError:
                continue
            return call_roll(listener, place.token, claim, timeout_s)
    raise CollectiveError(
        f"one of the ports {place.ports} must be free on {address}, but all are in "
        f"use. {_CURE}"
    )


def _join(place: _Place, claim: Claim, timeout_s: float) -> Store:
    """Try until a port of rank 0's host answers with the token."""
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        store = _try_all(place, claim.rank, timeout_s)
        if store is not None:
            return store
        # Many ranks that ask often would keep rank 0's host busy while it starts.
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise CollectiveError(
        f"rank 0 must answer at {' or '.join(place.addresses)} within {timeout_s:g} s, "
        f"on one of the ports {place.ports}, but did not answer rank {claim.rank}. "
        f"See whether it started and whether a firewall is between. {_CURE}"
    )


def _try_all(place: _Place, rank: int, timeout_s: float) -> Store | None:
    for address in place.addresses:
        for port in place.ports:
            store = answer_roll(address, port, place.token, rank, timeout_s)
            if store is not None:
                return store
    return None
