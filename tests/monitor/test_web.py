"""The server of a job's page: who gets it, what it sends, and who can hold it up."""

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.limits import HANG_S
from tests.monitor.jobs import make_watcher

from ronde.errors import UsageError
from ronde.monitor import WebPage, publish

PATHS = ("/", "/page.js", "/page.css", "/uPlot.iife.min.js", "/events", "/x", "//[")


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: str


@contextmanager
def open_path(page, path, *, token="", **headers):
    """Send a request, and yield the response, whose body is unread."""
    url = urlsplit(page.where)
    client = http.client.HTTPConnection(url.hostname, url.port, timeout=HANG_S)
    with closing(client):
        path += f"?token={token}" if token else ""
        client.request("GET", path, headers=headers)
        with client.getresponse() as response:
            yield response


def ask(page, path, **options):
    with open_path(page, path, **options) as response:
        return Response(response.status, response.headers, response.read().decode())


def open_events(page):
    return open_path(page, "/events", token=token_of(page))


def token_of(page):
    return page.where.partition("token=")[2]


def read_events(response):
    """Yield the events of a stream, as pairs of name and data."""
    name = ""
    for line in response:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field.startswith("data"):
            yield name, json.loads(value) if value else None


def test_nothing_is_served_without_the_token():
    with WebPage() as page:
        for path in PATHS:
            assert ask(page, path).status == 403
            assert ask(page, path + "?token=x").status == 403
            assert ask(page, path, Cookie="ronde_0=x").status == 403
            assert ask(page, path, Cookie="a;=\x7f").status == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "[::2]:80", ""]
)
def test_another_host_name_is_refused(host):
    # A name of another site may resolve to 127.0.0.1.
    with WebPage() as page:
        assert ask(page, "/", token=token_of(page), Host=host).status == 403


def test_a_page_forbids_everything_from_elsewhere_and_leaves_a_cookie():
    with WebPage() as page:
        response = ask(page, "/", token=token_of(page), Host="localhost:1")
        assert response.status == 200
        assert "page.js" in response.body
        assert "http" not in response.body
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; ")
        assert "unsafe" not in policy
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers
        cookie, *attributes = response.headers["Set-Cookie"].split("; ")
        assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict"]
        for path in PATHS[:-3]:
            assert ask(page, path, Cookie=cookie).status == 200
        assert ask(page, "/x", Cookie=cookie).status == 404
        with WebPage() as other:
            assert ask(other, "/", Cookie=cookie).status == 403


def test_a_stream_has_the_history_then_each_view_and_the_end():
    view = make_watcher(2).view()
    page, found = WebPage(), []

    def views():
        yield view
        events = read_events(stack.enter_context(open_events(page)))
        (name, (point,)), (_, first) = next(events), next(events)
        assert name == "history"
        assert point == [view.at, 0.2, view.tokens_per_s, 2.5, *view.shares]
        assert first["point"] == point
        yield view._replace(at=view.at + 1, loss=float("nan"))
        name, news = next(events)
        assert (name, news["point"][3]) == ("view", "nan")
        assert news["view"]["loss"] == "nan"
        assert news["view"]["ranks"][0]["host"] == "node0"
        found.append(events)

    with ExitStack() as stack:
        publish(views(), [page])
        assert list(found[0]) == [("end", None)]
    with pytest.raises(OSError, match="refused"):
        ask(page, "/")


def test_an_interrupted_page_does_not_end_the_job():
    page = WebPage()

    def views():
        yield make_watcher(1).view()
        found.append(read_events(stack.enter_context(open_events(page))))
        assert [next(found[0])[0], next(found[0])[0]] == ["history", "view"]
        raise KeyboardInterrupt

    found = []
    with ExitStack() as stack:
        with pytest.raises(KeyboardInterrupt):
            publish(views(), [page])
        assert list(found[0]) == []


def test_silent_and_stalled_clients_hold_nobody_up():
    view = make_watcher(64).view()
    with WebPage() as page, ExitStack() as stack:
        url = urlsplit(page.where)

        def connect():
            sock = socket.create_connection((url.hostname, url.port), timeout=HANG_S)
            return stack.enter_context(sock)

        first = connect()
        events = read_events(stack.enter_context(open_events(page)))
        stack.enter_context(open_events(page))  # and never read
        for _ in range(80):
            connect()
        for second in range(300):  # more than its buffers take
            page.add(view._replace(at=view.at + second))
        assert any(
            name == "view" and news["point"][0] == view.at + 299
            for name, news in events
        )
        assert ask(page, "/", token=token_of(page)).status == 200
        assert first.recv(1) == b""  # it made room for the others


def test_a_port_in_use_is_refused():
    with WebPage() as page, pytest.raises(UsageError, match="must be a free port"):
        WebPage(urlsplit(page.where).port)
    with pytest.raises(UsageError, match="the port must be from 0 to 65535, got 70000"):
        WebPage(70000)
