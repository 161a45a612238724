"""A page on this host that shows a job in a browser: ``ronde top --web``.

Note [The page's history]
    A browser that connects gets the last hour: a point a second, and the figures of
    each host every ten seconds. They are kept as text, in at most 0.6 MB and 22 kB for
    each host.
"""

import hashlib
import json
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from math import isfinite
from pathlib import Path
from typing import Protocol, Self, cast
from urllib.parse import parse_qs

from ronde.monitor.http_server import HttpRequest, HttpServer
from ronde.monitor.usage import GpuUsage, HostUsage, NetworkCounters
from ronde.monitor.view import Shares, WatchedHost, WatchedJob, WatchedRank
from ronde.status.table import JobInfo

_MOST_POINTS = 3600
_HOSTS_EVERY = 10
_MOST_STREAMS = 16
_ALIVE_S = 5.0  # after which a stream without news shows that it is alive
_END_S = 2.0  # for the streams to send the end
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
_REFUSED = b"The token is wrong or missing. Open the URL that ronde top printed.\n"
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_FILES = ("index.html", "page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")
_VALUES = (
    WatchedJob,
    JobInfo,
    WatchedRank,
    WatchedHost,
    HostUsage,
    GpuUsage,
    NetworkCounters,
    Shares,
)


class ViewSink(Protocol):
    """A receiver of a job's views; a context manager that ends with the job."""

    where: str  # a URL, or the path of a file

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...

    def add(self, view: WatchedJob) -> None: ...


class WebPage:
    """Serves a page with a job's views on 127.0.0.1; a context manager.

    Leaving it without an error ends the job on the page. ``where`` has the token
    without which nothing is served.

    Raises:
        UsageError: The port is in use.
    """

    def __init__(self, port: int = 0, token: str = "") -> None:
        self._token = token or secrets.token_urlsafe()
        # Browsers send a host's cookies to all of its ports.
        self._cookie = "ronde_" + hashlib.sha256(self._token.encode()).hexdigest()[:16]
        own = Path(__file__).parent / "page"
        self._files = {f"/{name}": (own / name).read_bytes() for name in _FILES}
        self._feed = _Feed()
        self._server = HttpServer("127.0.0.1", port, self._respond)
        self.where = f"http://127.0.0.1:{self._server.port}/?token={self._token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._feed.close(is_over=kind is None)
        self._server.close()

    def add(self, view: WatchedJob) -> None:
        self._feed.add(view)

    def _respond(self, request: HttpRequest) -> None:
        path, _, query = request.path.partition("?")
        path = "/index.html" if path == "/" else path
        given = parse_qs(query).get("token", [self._read_cookie(request)])[0]
        if not compare_digest(given.encode(errors="replace"), self._token.encode()):
            request.reply(403, _REFUSED, headers=_SAFE)
        elif path == "/events":
            request.keep()
            self._feed.send_to(request)
        elif path == "/favicon.ico":
            request.reply(204, b"", headers=_SAFE)
        elif path in self._files:
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            kind = _KINDS[path.rpartition(".")[2]] + "; charset=utf-8"
            headers = {**_SAFE, "Set-Cookie": cookie}
            request.reply(200, self._files[path], kind, headers)
        else:
            request.reply(404, b"There is no such page.\n", headers=_SAFE)

    def _read_cookie(self, request: HttpRequest) -> str:
        try:
            cookies = SimpleCookie(request.headers.get("Cookie", ""))
        except CookieError:
            return ""
        return cookies[self._cookie].value if self._cookie in cookies else ""


def publish(views: Iterable[WatchedJob], sinks: Sequence[ViewSink]) -> None:
    """Pass a job's views on until they end, and then end the sinks."""
    with ExitStack() as stack:
        for sink in sinks:
            stack.enter_context(sink)
        for view in views:
            for sink in sinks:
                sink.add(view)


class _Feed:
    """Sends views to any number of streams; a slow one misses some."""

    def __init__(self) -> None:
        self._points: deque[str] = deque(maxlen=_MOST_POINTS)
        self._hosts: deque[str] = deque(maxlen=_MOST_POINTS // _HOSTS_EVERY)
        self._number = 0
        self._news = ""
        self._is_over = self._is_closed = False
        self._num_streams = 0
        self._changed = threading.Condition()

    def add(self, view: WatchedJob) -> None:
        figures = (view.step_s, view.tokens_per_s, view.loss)
        point = _to_json((view.at, *figures, *(view.shares or (None,) * 5)))
        hosts = "null"
        if self._number % _HOSTS_EVERY == 0:
            rates = {
                h.host: (h.cpu, h.received_per_s, h.sent_per_s) for h in view.hosts
            }
            hosts = _to_json((view.at, rates))
        # Of a host's workers the ranks have the figures.
        rows = [
            each._replace(usage=each.usage and each.usage._replace(workers={}))
            for each in view.hosts
        ]
        news = _to_json(view._replace(hosts=tuple(rows)))
        with self._changed:
            self._points.append(point)
            if hosts != "null":
                self._hosts.append(hosts)
            self._number += 1
            self._news = f'{{"view": {news}, "point": {point}, "hosts": {hosts}}}'
            self._changed.notify_all()

    def close(self, *, is_over: bool) -> None:
        """End all streams; ``is_over`` if the job has ended."""
        with self._changed:
            self._is_closed, self._is_over = True, is_over
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_streams, _END_S)

    def send_to(self, request: HttpRequest) -> None:
        """Send the history, and then each view, until the job or the client ends."""
        with self._changed:
            if self._num_streams >= _MOST_STREAMS:
                text = "Too many browsers show this job. Close one.\n"
                request.reply(503, text.encode(), headers=_SAFE)
                return
            self._num_streams += 1
            history = self._history()
        request.close_connection = True
        kind = {"Content-Type": "text/event-stream", "Connection": "close"}
        try:
            request.begin(200, {**_SAFE, **kind})
            self._send(request, history)
        finally:
            with self._changed:
                self._num_streams -= 1
                self._changed.notify_all()

    def _send(self, request: HttpRequest, history: str) -> None:
        text = f"retry: 1000\nevent: history\ndata: {history}\n\n"
        sent, is_last = 0, False
        while not is_last:
            with self._changed:
                number, news, is_last = self._number, self._news, self._is_closed
            if number != sent:
                text += f"event: view\ndata: {news}\n\n"
            sent = number
            text += "event: end\ndata:\n\n" * (is_last and self._is_over)
            request.wfile.write((text or ":\n\n").encode())
            text = ""
            with self._changed:
                if self._number == sent and not self._is_closed:
                    self._changed.wait(_ALIVE_S)

    def _history(self) -> str:
        fields = {kind.__name__: kind._fields for kind in _VALUES}
        points, hosts = ", ".join(self._points), ", ".join(self._hosts)
        shown = f'"points": [{points}], "hosts": [{hosts}]'
        return f'{{"fields": {json.dumps(fields)}, {shown}}}'


def _to_json(value: object) -> str:
    return json.dumps(_to_plain(value), separators=(",", ":"))


def _to_plain(value: object) -> object:
    """Round floats; those that JSON does not have become text."""
    if isinstance(value, float):
        return round(value, 6) if isfinite(value) else str(value)
    if isinstance(value, tuple | list):
        return [_to_plain(item) for item in cast("Sequence[object]", value)]
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {name: _to_plain(item) for name, item in items}
    return value
