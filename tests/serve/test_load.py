"""``ronde bench serve``: load on real HTTP servers that answer as a test plans."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from hypothesis import given, strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.cli.conftest import Ronde
from tests.commands import refusal
from tests.limits import HANG_S

from ronde.bench import Exit
from ronde.cli import main
from ronde.errors import UsageError
from ronde.records import read_records
from ronde.serve import (
    CompletionServer,
    LoadOutcome,
    LoadRequest,
    Workload,
    find_server,
    parse_lengths,
    run_load,
)

DELAY_S = 0.05  # before each token
REFUSING, FAILING, CUTTING, BROKEN, MUTE = range(5)  # first tokens of prompts


def event_of(token_ids=(), text="", finish=None, usage=None) -> str:
    choice = {"token_ids": [*token_ids], "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': usage})}\n\n"


class Planned:
    """A server of completions; token n of an answer is n."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.num_awaited = 0  # answers begin once so many requests have come
        self.all_have_come = asyncio.Event()
        self.known = {"ignore_eos", "return_token_ids", "stream_options"}
        self.takes_ids = True

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "planned", "max_model_len": 500}]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.keys.append(request.headers.get("authorization"))
        usual = {"model", "prompt", "max_tokens", "temperature", "stream"}
        if unknown := body.keys() - usual - self.known:
            return JSONResponse({"detail": f"unexpected: {unknown}"}, 422)
        if not self.takes_ids and not isinstance(body["prompt"], str):
            return JSONResponse({"error": {"message": "prompt must be text"}}, 400)
        self.bodies.append(body)
        if len(self.bodies) >= self.num_awaited:
            self.all_have_come.set()
        kind = body["prompt"][0] if body["max_tokens"] > 1 else None
        if kind == REFUSING:
            return JSONResponse({"error": {"message": "queue is full"}}, 429)
        if kind == FAILING:
            return JSONResponse({"error": {"message": "quarantined"}}, 500)
        headers = {"content-type": "text/event-stream"}
        return StreamingResponse(self.events(body, kind), headers=headers)

    async def events(self, body: dict, kind: int | None) -> AsyncIterator[str]:
        if len(body["prompt"]) > 1:
            await self.all_have_come.wait()
        num = body["max_tokens"]
        text = ""
        for token in range(num) if kind != MUTE else ():
            await asyncio.sleep(DELAY_S)
            if token == 1 and kind == CUTTING:
                raise ConnectionAbortedError
            if token == 1 and kind == BROKEN:
                yield f"data: {json.dumps({'error': {'message': 'rank 1 died'}})}\n\n"
                return
            finish = "length" if token == num - 1 else None
            text = f": keep-alive\n\n{event_of((token,), 'w', finish)}"
            for start in range(0, len(text), 7):  # chunks that divide lines
                yield text[start : start + 7]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def served(planned: Planned) -> Iterator[str]:
    """Serve it by HTTP in a thread; yield the URL."""
    app = Starlette(
        routes=[
            Route("/v1/models", planned.models),
            Route("/v1/completions", planned.completions, methods=["POST"]),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def answering(pieces: list[bytes]) -> Iterator[CompletionServer]:
    """Answer one connection with these bytes, each sent by itself."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while b"\r\n\r\n" not in connection.recv(1 << 16, socket.MSG_PEEK):
                pass
            with suppress(OSError):  # the client may have seen enough
                for piece in pieces:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield CompletionServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def load(url: str, requests: list[LoadRequest], key: str = "") -> LoadOutcome:
    async def run() -> LoadOutcome:
        found = await find_server(CompletionServer(url, key))
        return await run_load(found, requests, HANG_S)

    return asyncio.run(run())


def kinds(outcome: LoadOutcome) -> Counter[str]:
    return Counter(each.error.partition(":")[0] for each in outcome.requests)


def test_answers_are_counted_and_timed_from_arrivals():
    planned = Planned()
    workload = Workload(
        20, parse_lengths("3-9"), parse_lengths("2-5"), rate=200.0, num_shared=4, seed=3
    )
    requests = workload.draw(vocabulary=30)
    planned.num_awaited = len(requests) + 1  # the probe comes first
    with served(planned) as url:
        # A client that waits for answers would never send the second request.
        outcome = load(url, requests, key="secret")
    assert kinds(outcome) == {"": 20}
    assert set(planned.keys) == {"Bearer secret"}
    bodies = planned.bodies[1:]
    assert sorted(each["prompt"] for each in bodies) == sorted(
        each.prompt for each in requests
    )
    assert {tuple(each["prompt"][:4]) for each in bodies} == {
        tuple(requests[0].prompt[:4])
    }
    assert all(each["stream"] and each["ignore_eos"] for each in bodies)
    last_due_s = max(each.due_s for each in requests)
    for each in requests:
        num = each.max_tokens
        assert each.token_ids == [*range(num)]
        assert each.num_made == num
        assert each.usage["prompt_tokens"] == len(each.prompt)
        assert len(each.gaps_s()) == num - 1
        # No answer begins before the last request; all its delays come after.
        assert each.times_s[0] >= last_due_s + DELAY_S
        assert each.times_s[-1] >= last_due_s + num * DELAY_S
        assert each.times_s == sorted(each.times_s)
    figures = outcome.figures()
    num_made = sum(each.max_tokens for each in requests)
    assert figures["tokens_per_s"] * outcome.span_s == pytest.approx(num_made)
    assert figures["requests_per_s"] * outcome.span_s == pytest.approx(20)
    assert figures["ttft_p50_ms"] < figures["e2e_p50_ms"] <= figures["e2e_p99_ms"]
    assert figures["ttft_p50_ms"] >= DELAY_S * 1000
    assert 0 < figures["client_late_p50_ms"] <= figures["client_late_p99_ms"]


def test_failures_are_counted_by_kind():
    firsts = [REFUSING, REFUSING, FAILING, CUTTING, BROKEN, MUTE, 20, 20, 20]
    requests = [LoadRequest([first, 7], 3) for first in firsts]
    with served(Planned()) as url:
        outcome = load(url, requests)
    assert kinds(outcome) == {
        "HTTP 429": 2,
        "HTTP 500": 1,
        "IncompleteReadError": 1,
        "error event": 1,
        "cut": 1,
        "": 3,
    }
    messages = " ".join(each.error for each in requests)
    assert "queue is full" in messages
    assert "rank 1 died" in messages
    assert outcome.figures()["tokens_per_s"] * outcome.span_s == pytest.approx(9)


BODY = (
    f": hello\r\n\r\n{event_of((7, 8), 'ab')}{event_of((9,), '')}"
    f"data:{event_of((), '', 'length')[6:]}data: [DONE]\n\n"
).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def framed(how: str, sizes: list[int]) -> bytes:
    if how == "length":
        return HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    if how == "close":
        return HEAD + b"\r\n" + BODY
    chunks, rest = b"", BODY
    while rest:
        size = sizes[len(chunks) % len(sizes)]
        chunks += b"%x;note=1\r\n%b\r\n" % (len(rest[:size]), rest[:size])
        rest = rest[size:]
    return HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + chunks + b"0\r\nX: y\r\n\r\n"


def ask(pieces: list[bytes]) -> LoadRequest:
    request = LoadRequest([1], 3)
    with answering(pieces) as server:
        asyncio.run(server.complete(server.body_of(request), request, HANG_S))
    return request


@pytest.mark.parametrize("how", ["length", "close", "chunked"])
@pytest.mark.parametrize("size", [1, 5, 1 << 16])
def test_pieces_of_any_size_are_read_alike(how, size):
    raw = framed(how, [1, 2, 3, 50])
    request = ask([raw[start : start + size] for start in range(0, len(raw), size)])
    assert (request.error, request.token_ids) == ("", [7, 8, 9])
    assert (request.counts, request.num_made) == ([2, 1], 3)


@pytest.mark.parametrize("how", ["length", "close", "chunked"])
def test_an_answer_without_its_end_is_cut(how):
    raw = framed(how, [BODY.index(b"data:{"), 1000])
    cut = ask([raw[: raw.index(b"data:{")]])
    assert cut.error.startswith("cut" if how == "close" else "IncompleteReadError")
    assert cut.token_ids == ([] if how == "length" else [7, 8, 9])


def test_an_answer_with_its_end_may_be_cut():
    raw = framed("chunked", [1000])
    assert ask([raw[: raw.rindex(b"0\r\nX")]]).error == ""


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "IncompleteReadError"),
        (b"SSH-2.0-OpenSSH\r\n", "IncompleteReadError"),
        (b"220 mail.example.org ESMTP\r\n\r\n", "ValueError"),
        (HEAD + b"\r\ndata: {broken\n\n", "JSONDecodeError"),
        (HEAD + b"\r\ndata: 5\n\n", "AttributeError"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "ValueError"),
        (b"HTTP/1.1 503 Away\r\n\r\nnot now", "HTTP 503"),
        (b"x" * (1 << 18), "LimitOverrunError"),
    ],
)
def test_what_is_no_answer_has_a_kind(raw, kind):
    assert ask([raw]).error.partition(":")[0] == kind


def test_a_server_that_does_not_listen_is_a_kind():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = CompletionServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    outcome = asyncio.run(run_load(server, [LoadRequest([1], 1)] * 1, HANG_S))
    assert kinds(outcome) == {"ConnectionRefusedError": 1}
    assert "ttft_p50_ms" not in outcome.figures()


def test_gaps_are_between_tokens_and_without_the_first():
    request = LoadRequest([1], 6, due_s=10.0, is_done=True)
    request.times_s, request.counts = [12.0, 13.0, 15.0], [2, 1, 3]
    assert request.gaps_s() == [1.0, 2 / 3, 2 / 3, 2 / 3]
    figures = LoadOutcome([request], 5.0, [], 0.0).figures()
    assert figures["ttft_p50_ms"] == figures["ttft_p99_ms"] == 2000
    assert (figures["e2e_p95_ms"], figures["tokens_per_s"]) == (5000, 1.2)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50))
def test_percentiles_are_those_of_numpy(times_s):
    requests = [
        LoadRequest([1], 1, times_s=[each], counts=[1], is_done=True)
        for each in times_s
    ]
    figures = LoadOutcome(requests, 1.0, [], 0.0).figures()
    for percent in (50, 95, 99):
        right = 1000 * np.percentile(times_s, percent)
        assert figures[f"ttft_p{percent}_ms"] == pytest.approx(right)


def test_a_starved_client_is_seen():
    async def run() -> tuple[LoadOutcome, float]:
        running = asyncio.create_task(run_load(server, requests, HANG_S))
        await asyncio.sleep(0)  # it has chosen its times
        began_s = time.monotonic()
        sum(range(5_000_000))
        starved_s = time.monotonic() - began_s
        return await running, starved_s

    requests = [LoadRequest([20], 2) for _ in range(5)]
    planned = Planned()
    with served(planned) as url:
        server = CompletionServer(url)
        outcome, starved_s = asyncio.run(run())
    late_s = starved_s - 0.01  # of requests that were due after 10 ms
    assert max(outcome.late_s) >= late_s > 0
    # The wait counts, although the requests were sent after it.
    figures = outcome.figures()
    assert figures["ttft_p50_ms"] >= 1000 * (late_s + DELAY_S)
    assert figures["client_late_p99_ms"] > figures["client_late_p50_ms"]


@pytest.mark.parametrize(
    ("known", "takes_ids", "is_text"),
    [
        ({"ignore_eos", "return_token_ids", "stream_options"}, False, True),
        ({"stream_options"}, False, True),
        ({"ignore_eos", "return_token_ids", "stream_options"}, True, False),
    ],
)
def test_a_server_gets_the_first_form_that_it_knows(known, takes_ids, is_text):
    planned = Planned()
    planned.known, planned.takes_ids = known, takes_ids
    planned.all_have_come.set()
    with served(planned) as url:
        outcome = load(url, [LoadRequest([25, 26, 27], 2)])
    assert kinds(outcome) == {"": 1}
    prompt = planned.bodies[-1]["prompt"]
    assert len(prompt.split() if is_text else prompt) == 3


def test_lengths_and_arrivals_are_as_asked():
    workload = Workload(4000, parse_lengths("exp:40"), parse_lengths("7"), rate=50.0)
    requests = workload.draw(100)
    assert requests == workload.draw(100)
    assert {each.max_tokens for each in requests} == {7}
    lengths = [len(each.prompt) for each in requests]
    # Means of 4,000 exponential numbers, within five deviations.
    assert abs(np.mean(lengths) / 40 - 1) < 5 / 4000**0.5
    assert abs(requests[-1].due_s / (4000 / 50) - 1) < 5 / 4000**0.5
    at_once = workload._replace(rate=0.0).draw(100)
    assert {each.due_s for each in at_once} == {0.0}
    assert [each.prompt for each in at_once] == [each.prompt for each in requests]
    uniform = workload._replace(prompt=parse_lengths("3-5"), seed=1).draw(100)
    assert {len(each.prompt) for each in uniform} == {3, 4, 5}


@pytest.mark.parametrize("text", ["0", "9-3", "0-4", "exp:0", "exp:", "1.5", "", "-4"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(UsageError, match="must be a number of tokens"):
        parse_lengths(text)


def test_the_command_shows_a_table_and_appends_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, key = tmp_path / "records", tmp_path / "key"
    key.write_text("secret\n")
    planned = Planned()
    planned.all_have_come.set()
    words = ["--requests", "6", "--rate", "max", "--prompt-len", "5-9", "--rounds", "2"]
    words += ["--output-len", "3", "--warmup", "2", "--api-key-file", str(key)]
    with served(planned) as url:
        words = [f"{url}/v1/", *words, "--vocabulary", "30", "--json", str(record)]
        code = main(["bench", "serve", *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for name in ("ttft p50 ms", "itl p99 ms", "e2e p95 ms", "tokens per s", "client"):
        assert f"\n{name}" in out
    assert len(planned.bodies) == 1 + 2 + 2 * 6
    (found,) = read_records(record, "bench_serve")
    assert found.values["servers"]["planned"]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "a URL or MODEL is required"),
        (("ftp://h:1",), "server must be a URL such as http://"),
        (("http://",), "server must be a URL such as http://"),
        (("http://h:99999",), "Port out of range"),
        (("./nothing",), "config.json"),
        (("http://h", "--rate", "-1"), "--rate must be arrivals a second"),
        (("http://h", "--rate", "nan"), "--rate must be arrivals a second"),
        (("http://h", "--requests", "0"), "--requests must be a whole number of at"),
        (("http://h", "--prompt-len", "9-3"), "--prompt-len must be a number of"),
        (("http://h", "--static"), "Give the model's folder"),
        (("http://h", "--check"), "Give the model's folder"),
        (("http://h", "--", "-n", "2"), "Give the model's folder"),
        (("http://h", "--json", "/nowhere/x"), "--json must be a file"),
        (("http://h", "--api-key-file", "/nowhere"), "--api-key-file must hold a key"),
        (("http://127.0.0.1:{port}",), "Connect call failed"),
        (("{folder}", "--prompt-len", "60"), "60 + 64 = 124"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    words: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _write_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = tuple(each.format(port=port, folder=tmp_path) for each in words)
    text = refusal(capsys, "bench", "serve", *words, code=Exit.USAGE)
    assert reason in text
    assert text.count("\n") == 1


def _write_config(folder: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}
    config |= {"vocab_size": 30, "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(config))


def test_what_the_server_refuses_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    planned = Planned()
    planned.takes_ids, planned.known = False, set()
    with served(planned) as url:
        text = refusal(capsys, "bench", "serve", url, code=Exit.USAGE)
        assert "HTTP 422" in text
        long = (url, "--prompt-len", "490")
        planned.takes_ids, planned.known = True, Planned().known
        planned.all_have_come.set()
        text = refusal(capsys, "bench", "serve", *long, code=Exit.USAGE)
        assert "490 + 64 = 554" in text


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    _write_config(tmp_path)
    ended = Ronde()(
        "bench", "serve", str(tmp_path), "--prompt-len", "9", "--", "--port", "x"
    )
    assert (ended.returncode, ended.stdout) == (Exit.USAGE, b"")
    own, reported = ended.stderr.decode().splitlines()
    assert "--port must be a whole number" in own
    assert "ronde serve must start" in reported


@pytest.mark.soak
def test_policies_of_own_servers_are_compared_and_checked(tmp_path: Path) -> None:
    model, record = str(tmp_path / "model"), tmp_path / "records"
    example = Path(__file__).parents[2] / "examples" / "make_llama.py"
    subprocess.run([sys.executable, example, model], check=True)
    words = ["--requests", "6", "--rounds", "2", "--output-len", "exp:9", "--check"]
    words += ["--static", "--json", str(record), "--", "-n", "1"]
    ended = Ronde()("bench", "serve", model, *words)
    out = ended.stdout.decode()
    assert (ended.returncode, out.count(" 12 of 12 requests answered")) == (0, 2), out
    assert "# check: 0 of 24 answers differ" in out
    assert "guaranteed_no_evict  static_batch  ratio" in out
    (found,) = read_records(record, "bench_serve")
    assert [*found.values["servers"]] == ["guaranteed_no_evict", "static_batch"]
    # In other arithmetic some differ, and each that is not there.
    words = ["--requests", "6", "--check", "--", "--dtype", "bfloat16"]
    ended = Ronde()("bench", "serve", model, *words)
    assert ended.returncode == Exit.FAILED
    assert b" of 6 answers differ; the first, " in ended.stdout
