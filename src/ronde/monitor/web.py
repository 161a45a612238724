"""A page on this host that shows a job in a browser: ``ronde top --web``.

A browser that connects gets a point a second of the last hour, in at most 0.4 MB.
"""

import hashlib
import json
import re
import secrets
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Self, cast
from urllib.parse import parse_qs

from ronde.addresses import is_loopback
from ronde.errors import UsageError
from ronde.monitor.view import WatchedJob, view_to_plain

_MOST_CLIENTS = 64
_STALL_S = 10.0
_POLL_S = 0.1
_MOST_POINTS = 3600
_ALIVE_S = 5.0  # after which a stream without news shows that it is alive
_END_S = 2.0  # for the streams to send the end
_SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_REFUSED = b"The token is wrong or missing. Open the URL that ronde top printed.\n"
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_FILES = ("index.html", "page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")


class ViewSink:
    """A receiver of a job's views; a context manager that ends with the job."""

    where: str  # a URL, or the path of a file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        raise NotImplementedError

    def add(self, view: WatchedJob) -> None:
        raise NotImplementedError


def publish(views: Iterable[WatchedJob], sinks: Sequence[ViewSink]) -> None:
    """Pass a job's views on until they end, and then end the sinks."""
    with ExitStack() as stack:
        for sink in sinks:
            stack.enter_context(sink)
        for view in views:
            for sink in sinks:
                sink.add(view)


class WebPage(ViewSink):
    """Serves a page with a job's views on 127.0.0.1.

    Leaving it without an error ends the job on the page. ``where`` has the token
    without which nothing is served. A slow browser misses views.

    Raises:
        UsageError: The port is in use.
    """

    def __init__(self, port: int = 0, token: str = "") -> None:
        self._token = token or secrets.token_urlsafe()
        # Browsers send a host's cookies to all of its ports.
        self._cookie = "ronde_" + hashlib.sha256(self._token.encode()).hexdigest()[:16]
        own = Path(__file__).parent / "page"
        self._files = {f"/{name}": (own / name).read_bytes() for name in _FILES}
        self._points: deque[str] = deque(maxlen=_MOST_POINTS)
        self._news = ""
        self._end: str | None = None  # the last event, once the page is closed
        self._num_streams = 0
        self._changed = threading.Condition()
        self._server = HttpServer("127.0.0.1", port, self._respond)
        self.where = f"http://127.0.0.1:{self._server.port}/?token={self._token}"

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._changed:
            self._end = "event: end\ndata:\n\n" if kind is None else ""
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_streams, _END_S)
        self._server.close()

    def add(self, view: WatchedJob) -> None:
        plain = view_to_plain(view)
        figures = [plain[name] for name in ("at", "step_s", "tokens_per_s", "loss")]
        point = json.dumps([*figures, *(view.shares or (None,) * 5)])
        with self._changed:
            self._points.append(point)
            self._news = f'{{"view": {json.dumps(plain)}, "point": {point}}}'
            self._changed.notify_all()

    def _respond(self, request: "HttpRequest") -> None:
        path, _, query = request.path.partition("?")
        path = "/index.html" if path == "/" else path
        if not self._has_token(query, request.headers.get("Cookie", "")):
            request.reply(403, _REFUSED)
        elif path == "/events":
            self._stream(request)
        elif path == "/favicon.ico":
            request.reply(204, b"")
        elif path in self._files:
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            kind = _KINDS[path.rpartition(".")[2]] + "; charset=utf-8"
            request.reply(200, self._files[path], kind, {"Set-Cookie": cookie})
        else:
            request.reply(404, b"There is no such page.\n")

    def _has_token(self, query: str, cookies: str) -> bool:
        given = parse_qs(query).get("token", [])
        named = [each.strip().partition("=") for each in cookies.split(";")]
        given += [value for name, _, value in named if name == self._cookie]
        token = self._token.encode()
        return any(compare_digest(g.encode(errors="replace"), token) for g in given)

    def _stream(self, request: "HttpRequest") -> None:
        """Send the history, and then each view, until the job or the client ends."""
        with self._changed:
            self._num_streams += 1
            history = ", ".join(self._points)
        try:
            request.keep()
            kind = {"Content-Type": "text/event-stream", "Connection": "close"}
            request.begin(200, kind)
            self._send_events(request, history)
        finally:
            with self._changed:
                self._num_streams -= 1
                self._changed.notify_all()

    def _send_events(self, request: "HttpRequest", history: str) -> None:
        text = f"retry: 1000\nevent: history\ndata: [{history}]\n\n"
        sent, end = "", None
        while end is None:
            with self._changed:
                news, end = self._news, self._end
            if news is not sent:
                text += f"event: view\ndata: {news}\n\n"
            sent = news
            request.wfile.write((text + (end or "") or ":\n\n").encode())
            text = ""
            with self._changed:
                if self._news is sent and self._end is None:
                    self._changed.wait(_ALIVE_S)


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
        """Let the client stay connected until its response ends."""
        self.close_connection = True
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
        for name, value in {**_SAFE, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "ronde"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
        """Write no log."""


class HttpServer(ThreadingHTTPServer):
    """A running server with a thread for each client; silent ones delay no others.

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
