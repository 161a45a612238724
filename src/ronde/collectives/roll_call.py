"""How ranks that have to find rank 0 by trying make sure that they have found it.

Whoever listens on a port that was guessed, or that a killed job left in a file, may be
another job or another program, and torch's client would wait for its answer for ever.
So rank 0 first calls the roll: the others show a token and their number, and are told
the port of the store. The socket for that is closed when all have been there.

The token keeps jobs apart. It keeps nobody out of the store, which answers everybody.
"""

import hmac
import socket
import time
from datetime import timedelta

from torch.distributed import TCPStore

from ronde.addresses import family_of
from ronde.errors import CollectiveError
from ronde.world.value import Claim

_MAX_LINE = 200
_VISITOR_S = 1.0
"""How long whoever comes may take to say who it is: others wait behind."""
_ANSWER_S = 5.0


def call_roll(
    listener: socket.socket, token: str, claim: Claim, timeout_s: float
) -> TCPStore:
    """Open a store beside a bound socket, and tell all other ranks its port there.

    Args:
        listener: Bound to the one address that is to be used, and not listening.
        token: What the others show.
        claim: Rank 0's place.
        timeout_s: How long to wait for the others, and the store for a key.

    Raises:
        CollectiveError: They did not come in time; those that are absent are named.
    """
    ends_at = time.monotonic() + timeout_s
    store = open_store(listener.getsockname()[0], timeout_s)
    absent = set(range(1, claim.size))
    listener.listen(claim.size)
    while absent:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            raise CollectiveError(
                f"{claim.size} ranks must meet within {timeout_s:g} s, got no word "
                f"from ranks {sorted(absent)[:8]} ({len(absent)} in all). See whether "
                "they started; if they run elsewhere, set MASTER_ADDR and MASTER_PORT."
            )
        listener.settimeout(left_s)
        try:
            visitor, _ = listener.accept()
        except (TimeoutError, ConnectionAbortedError):
            continue
        with visitor:
            absent.discard(_admit(visitor, token, store.port))
    return store


def answer_roll(
    address: str, port: int, token: str, rank: int, timeout_s: float
) -> TCPStore | None:
    """Connect to rank 0's store; None where nobody calls this roll, or not yet.

    Args:
        address: Where rank 0 may be.
        port: Where it may call the roll.
        token: What it knows the job by.
        rank: This process.
        timeout_s: How long the store waits for a key.
    """
    try:
        with socket.create_connection((address, port), _ANSWER_S) as asking:
            asking.sendall(f"{token} {rank}\n".encode())
            store_port = int(_read_line(asking))
            # Until then rank 0 counts on being asked once more.
            asking.sendall(b"\n")
    except (OSError, ValueError):
        return None
    return TCPStore(
        address,
        store_port,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def open_store(address: str, timeout_s: float) -> TCPStore:
    """Answer as a store on a free port of one address and on no other address."""
    with socket.socket(family_of(address)) as listener:
        listener.bind((address, 0))
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _admit(visitor: socket.socket, token: str, port: int) -> int:
    """Tell a visitor that shows the token the port; return its rank, else -1."""
    visitor.settimeout(_VISITOR_S)
    try:
        shown, _, rank = _read_line(visitor).partition(" ")
        if not hmac.compare_digest(shown, token):
            return -1
        visitor.sendall(f"{port}\n".encode())
        _read_line(visitor)
        return int(rank)
    except (OSError, ValueError):
        return -1


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(_MAX_LINE)
        line += data
        if not data or len(line) > _MAX_LINE:
            raise ValueError("a line must end, and be short.")
    return line[:-1].decode("ascii")
