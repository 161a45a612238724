"""Streams between two hosts: as much as goes through in a fixed time, both ways.

Plain TCP through ``ronde.check.node``, several streams each way at the same time. It
shows links, switches and hosts that are slower than the others; it does not show what
NCCL or an RDMA adapter reaches, and on fast links one processor's copying may be the
limit.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from ronde.check.facts import Value
from ronde.check.hosts import HostSet, NodeContext
from ronde.check.judging import HostPair

# Each way: clouds let one stream alone have only a part of a link.
NUM_STREAMS = 4
# How long a pair may take until all its streams are there.
MEET_S = 2.0
_STREAM_S = 0.3
# How long a stream runs before it counts.
_WARM_S = 0.1
_LISTENER = "bandwidth.listener"
_TOKEN_BYTES = 16
_CHUNK_BYTES = 1 << 20
_SLACK_S, _OFFER_S, _REPLY_S = 0.2, 5.0, 5.0


def offer_streams(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Listen for streams at ``address`` until the program ends; return ``port``."""
    address = question["address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    context.memory[_LISTENER] = context.closing.enter_context(listener)
    return {"port": listener.getsockname()[1]}


def stream(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Send to one host and receive from it, both for a fixed time.

    The question has ``token``, in hexadecimal, which both hosts alone know; ``seconds``
    that count, once the streams run; and ``address`` and ``port`` of the other, unless
    that one connects. The answer has ``gb_per_s``: what has come in, in gigabytes (1e9)
    per second.
    """
    token = bytes.fromhex(question["token"])
    with ExitStack() as closing:
        # The one that connects sends on the first half.
        if "address" in question:
            place = question["address"], question["port"]
            lines = _connect(place, token, closing)
            sending, receiving = lines[:NUM_STREAMS], lines[NUM_STREAMS:]
        else:
            lines = _accept(context.memory[_LISTENER], token, closing)
            receiving, sending = lines[:NUM_STREAMS], lines[NUM_STREAMS:]
        rates = _run(sending, receiving, question["seconds"])
    return {"gb_per_s": sum(rates) / 1e9}


def _connect(
    place: tuple[str, int], token: bytes, closing: ExitStack
) -> list[socket.socket]:
    due_s = time.monotonic() + MEET_S
    lines: list[socket.socket] = []
    for number in range(2 * NUM_STREAMS):
        left_s = max(0.001, due_s - time.monotonic())
        line = socket.create_connection(place, left_s)
        lines.append(closing.enter_context(line))
        line.sendall(token + bytes([number]))
    return lines


def _accept(
    listener: socket.socket, token: bytes, closing: ExitStack
) -> list[socket.socket]:
    due_s = time.monotonic() + MEET_S
    lines: dict[int, socket.socket] = {}
    while len(lines) < 2 * NUM_STREAMS:
        left_s = due_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"the other host did not come within {MEET_S:g} s")
        listener.settimeout(left_s)
        line, _ = listener.accept()
        line.settimeout(max(0.001, due_s - time.monotonic()))
        greeting = b""
        with suppress(OSError):
            while more := line.recv(_TOKEN_BYTES + 1 - len(greeting)):
                greeting += more
        # Strangers come as well, and what an old pair left.
        is_known = hmac.compare_digest(greeting[:-1], token)
        if is_known and greeting[-1] in range(2 * NUM_STREAMS):
            lines[greeting[-1]] = closing.enter_context(line)
        else:
            line.close()
    return [lines[number] for number in sorted(lines)]


def _run(
    sending: list[socket.socket], receiving: list[socket.socket], seconds: float
) -> list[float]:
    """Return what came in on each line, in bytes per second."""
    for line in (*sending, *receiving):
        # What is under way when the time is up must not be in the next pair's way.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.settimeout(_WARM_S + seconds)
    tasks: list[Callable[[], float]] = [
        *(partial(_send, line, _WARM_S + seconds + _SLACK_S) for line in sending),
        *(partial(_receive, line, seconds) for line in receiving),
    ]
    with ThreadPoolExecutor(len(tasks)) as pool:
        running = [pool.submit(task) for task in tasks]
        return [each.result() for each in running]


def _send(line: socket.socket, seconds: float) -> float:
    """Send until the time is up, or the other has seen enough; return zero."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    due_s = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < due_s:
            line.send(chunk)
    return 0.0


def _receive(line: socket.socket, seconds: float) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    counted_from_s = time.monotonic() + _WARM_S
    due_s = counted_from_s + seconds
    num_bytes = 0
    with suppress(OSError):
        while time.monotonic() < due_s:
            num_read = line.recv_into(buffer)
            if not num_read:
                break
            if time.monotonic() >= counted_from_s:
                num_bytes += num_read
    line.close()
    # The sender ends a little earlier where it began earlier.
    return num_bytes / max(seconds / 2, time.monotonic() - counted_from_s)


class PairRates(NamedTuple):
    """What was measured of a pair of hosts."""

    # In GB/s, what the first and what the second of the pair receives.
    rates: tuple[float, float] = (0.0, 0.0)
    # Why there is none; empty where there is one.
    failure: str = ""
    # What looks wrong in NCCL's log, by rule.
    remarks: Mapping[str, Value] = {}


class Streams:
    """Plain TCP, both ways at the same time; needs nothing but Python."""

    max_rounds = 32

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}

    def open(self, hosts: HostSet) -> Mapping[str, str]:
        """Have the hosts listen; return those that cannot take part, and why."""
        questions: dict[str, dict[str, Value]] = {
            name: {"do": "offer_streams", "address": address}
            for name, address in hosts.addresses.items()
            if address
        }
        replies = hosts.ask(questions, _OFFER_S)
        failures = {name: reply.failure for name, reply in replies.items()}
        self._ports = {n: r.values["port"] for n, r in replies.items() if not r.failure}
        return {name: failure for name, failure in failures.items() if failure}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        """Have each pair send to each other for a fixed time."""
        questions: dict[str, dict[str, Value]] = {}
        for caller, called in pairs:
            token = secrets.token_hex(_TOKEN_BYTES)
            common = {"do": "stream", "token": token, "seconds": _STREAM_S}
            place = {"address": hosts.addresses[called], "port": self._ports[called]}
            questions |= {caller: common | place, called: common}
        replies = hosts.ask(questions, 2 * (MEET_S + _WARM_S + _STREAM_S) + _REPLY_S)
        found: dict[HostPair, PairRates] = {}
        for pair in pairs:
            one, other = (replies[host] for host in pair)
            if failure := one.failure or other.failure:
                found[pair] = PairRates(failure=failure)
            else:
                rates = one.values["gb_per_s"], other.values["gb_per_s"]
                found[pair] = PairRates(rates)
        return found
