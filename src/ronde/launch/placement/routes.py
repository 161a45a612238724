"""From where this host would reach others, and whether they answer."""

import errno
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from ronde.addresses import family_of, is_loopback, source_towards

DEADLINE_S = 2.0
_ANSWER_S = 1.5
_ASK_AGAIN_S = 0.25
_SSH_PORT = 22
"""Any port will do: where nothing listens, the kernel answers that."""


def locate(
    addresses: Sequence[str], port: int, deadline_s: float = DEADLINE_S
) -> tuple[str, ...]:
    """Return this host's own address towards each of some hosts' addresses.

    Empty stands for an address that no route leads to, or that is this host's own. A
    network that several hosts have, each for itself, is found out so: see also
    ``choose_meeting_point``.

    Args:
        addresses: Numeric addresses; one that is no address counts as not reached.
        port: Where not 0, it must answer there within the deadline: by a connection,
            or by refusing one, since what is bound and does not listen yet refuses.
        deadline_s: How long this may take for all of them together.
    """
    sources = [_source(address) for address in addresses]
    if not port:
        return tuple(sources)
    routed = {a for a, source in zip(addresses, sources, strict=True) if source}
    reached = _reached(routed, port, deadline_s)
    return tuple(
        source if address in reached else ""
        for address, source in zip(addresses, sources, strict=True)
    )


def find_answering(hosts: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the names of the hosts that answer at any of their addresses.

    They are asked again and again: of a line that was cut, only what is sent after its
    end arrives.

    Args:
        hosts: Addresses by name.
    """
    ends_at = time.monotonic() + _ANSWER_S
    found: set[str] = set()
    hosts = {name: own for name, own in hosts.items() if own}
    while time.monotonic() < ends_at and len(found) < len(hosts):
        asked_until = time.monotonic() + _ASK_AGAIN_S
        asked = [a for name, own in hosts.items() if name not in found for a in own]
        answers = zip(asked, locate(asked, _SSH_PORT, _ASK_AGAIN_S), strict=True)
        reached = {address for address, source in answers if source}
        found |= {name for name, own in hosts.items() if reached & {*own}}
        if len(found) < len(hosts):
            time.sleep(max(0.0, asked_until - time.monotonic()))
    return frozenset(found)


def _source(address: str) -> str:
    source = source_towards(address)
    return "" if source == address or is_loopback(source) else source


def _reached(addresses: Iterable[str], port: int, deadline_s: float) -> set[str]:
    """Return the addresses that answer on a port, asked all at once."""
    ends_at = time.monotonic() + deadline_s
    reached: set[str] = set()
    with ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for address in addresses:
            trying = sockets.enter_context(socket.socket(family_of(address)))
            trying.setblocking(False)  # noqa: FBT003  the socket's own method
            error = trying.connect_ex((address, port))
            if error == errno.EINPROGRESS:
                selector.register(trying, selectors.EVENT_WRITE, (trying, address))
            elif _is_answer(error):
                reached.add(address)
        while selector.get_map() and (left_s := ends_at - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                trying, address = key.data
                selector.unregister(trying)
                if _is_answer(trying.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                    reached.add(address)
    return reached


def _is_answer(error: int) -> bool:
    return error in (0, errno.ECONNREFUSED)
