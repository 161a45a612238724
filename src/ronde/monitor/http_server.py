"""An HTTP server for local pages, which silent or slow clients cannot hold up."""

import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, cast

from ronde.addresses import is_loopback
from ronde.errors import UsageError

_MOST_CLIENTS = 64
_STALL_S = 10.0
_POLL_S = 0.1


class HttpRequest(BaseHTTPRequestHandler):
    """A GET request; ``respond`` of its server answers it."""

    protocol_version = "HTTP/1.1"
    timeout = _STALL_S  # of each read and write

    def do_GET(self) -> None:
        # A page of another site may have its own name resolved to 127.0.0.1.
        server = cast("HttpServer", self.server)
        host = re.sub(r":[0-9]+$", "", self.headers.get("Host", ""))
        if server.is_local and host not in ("127.0.0.1", "localhost", "[::1]"):
            self.reply(403, b"The Host must be 127.0.0.1 or localhost.\n")
            return
        server.respond(self)

    def keep(self) -> None:
        """Let the client stay connected."""
        cast("HttpServer", self.server).keep(self.connection)

    def reply(
        self,
        code: int,
        body: bytes,
        kind: str = "text/plain; charset=utf-8",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        sizes = {"Content-Type": kind, "Content-Length": str(len(body))}
        self.begin(code, {**sizes, **(headers or {})})
        self.wfile.write(body)

    def begin(self, code: int, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        safe = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        for name, value in {**safe, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "ronde"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
        """Write no log."""


class HttpServer(ThreadingHTTPServer):
    """A running server with a thread for each client.

    With more than 64 clients, the one that has been connected longest is closed, but
    not those that ``keep`` was called for.

    Raises:
        UsageError: The address is not this host's, or the port is in use.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, respond: Callable[[HttpRequest], object]
    ) -> None:
        self.respond = respond
        self.is_local = host == "localhost" or is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._clients: dict[socket.socket, bool] = {}  # the longest connected first
        self._lock = threading.Lock()
        if not 0 <= port < 1 << 16:
            raise UsageError(f"the port must be from 0 to 65535, got {port}.")
        try:
            super().__init__((host, port), HttpRequest)
        except OSError as error:
            raise UsageError(
                f"{host}:{port} must be a free port on an address of this host: "
                f"{error.strerror}. Choose another one."
            ) from None
        run = threading.Thread(target=self.serve_forever, args=[_POLL_S], daemon=True)
        run.start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        with self._lock:
            for client in self._clients:
                _hang_up(client)

    def keep(self, client: socket.socket) -> None:
        with self._lock:
            self._clients[client] = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks a name up, which may block

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._clients[request] = False
            others = [each for each, is_kept in self._clients.items() if not is_kept]
            if len(others) > _MOST_CLIENTS:
                _hang_up(others[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if not isinstance(sys.exception(), OSError):  # the client is gone
            super().handle_error(request, client_address)


def _hang_up(client: socket.socket) -> None:
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
