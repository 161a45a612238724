"""The link of rank 0 to the front: a batch manager's callbacks on a socket."""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from ronde.serve.policy import Capacity
from ronde.serve.protocol import (
    Orders,
    RankMessage,
    ReplicaReady,
    StepReport,
    decode_from_front,
    encode_line,
)
from ronde.serve.requests import InferenceRequest, Response, Statistics
from ronde.store.local_socket import dial

_WAIT_S = 0.2
_TICK_S = 0.5  # a report at least so often
_DIAL_S = 10.0


class FrontLink:
    """Takes requests from the front and sends it the tokens; used on rank 0 alone.

    Args:
        path: The front's socket.
        generation: Of this replica's workers.
        cause: The reason that the generation before ended.
    """

    def __init__(self, path: str, generation: int, cause: str) -> None:
        self._path, self._generation, self._cause = path, generation, cause
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._new: deque[InferenceRequest] = deque()
        self._stopped: list[int] = []
        self._responses: list[Response] = []
        self._active: set[int] = set()
        self._sent_s = 0.0

    def attach(
        self,
        capacity: Capacity,
        stop: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """Set the functions to call at the last order, and once the front knows."""
        self._capacity, self._stop, self._on_ready = capacity, stop, on_ready

    def get_requests(self, most: int) -> list[InferenceRequest]:
        if self._responses or time.monotonic() - self._sent_s > _TICK_S:
            self._report(None)
        self._read(0 if self._active or self._new else _WAIT_S)
        return [self._new.popleft() for _ in range(min(most, len(self._new)))]

    def poll_stop(self) -> list[int]:
        self._read(0)
        stopped, self._stopped = self._stopped, []
        for request in [each for each in self._new if each.id in stopped]:
            self._new.remove(request)
            self.send_response(Response(request.id, is_final=True, finish="cancel"))
        return stopped

    def send_response(self, response: Response) -> None:
        self._responses.append(response)
        if response.is_final:
            self._active.discard(response.id)

    def send_stats(self, statistics: Statistics) -> None:
        self._report(statistics)

    def _report(self, statistics: Statistics | None) -> None:
        responses, self._responses = tuple(self._responses), []
        self._send(StepReport(responses, statistics))

    def _send(self, message: RankMessage) -> None:
        self._connect().sendall(encode_line(message))
        self._sent_s = time.monotonic()

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket = dial(self._path, _DIAL_S)
            self._socket.settimeout(None)
            self._send(
                ReplicaReady(os.getpid(), self._generation, self._cause, self._capacity)
            )
            self._on_ready()
        return self._socket

    def _read(self, wait_s: float) -> None:
        sock = self._connect()
        while select.select([sock], [], [], wait_s)[0]:
            wait_s = 0
            received = sock.recv(1 << 20)
            if not received:
                raise ConnectionResetError("ronde serve has closed its connection")
            *lines, rest = (self._received + received).split(b"\n")
            self._received = bytearray(rest)
            for line in lines:
                self._obey(decode_from_front(bytes(line)))

    def _obey(self, orders: Orders) -> None:
        self._new += orders.add
        self._active |= {each.id for each in orders.add}
        self._stopped += orders.cancel
        if orders.is_last:
            self._stop()
