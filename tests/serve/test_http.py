"""Clients call a front by OpenAI's interface, also bad, slow and vanishing ones."""

import http.client
import json
import socket
from contextlib import contextmanager

import openai
import pytest
from tests.limits import HANG_S, until
from tests.serve.local import BOS, EOS, make_tokenizer, served

from ronde.serve import FrontOptions, RejectedError

KEYS = ("first key", "zweiter Schlüssel")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
LONG = {"prompt": "abcd", "max_tokens": 2000, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("model"), comment_s=0.2) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with keys and little patience."""
    folder = tmp_path_factory.mktemp("model")
    options = {"api_keys": KEYS, "header_s": 0.5, "write_s": 0.5}
    with served(folder, FrontOptions(request_timeout_s=HANG_S), **options) as found:
        yield found


@pytest.fixture
def client(server):
    with connect(server) as found:
        yield found


def connect(server, key="any"):
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG_S
    )


@contextmanager
def closed_gate(server):
    """Let no step begin."""
    server.engine.gate.clear()
    try:
        yield
    finally:
        server.engine.gate.set()


def send(server, path, body=None, headers=(), method=""):
    """Return the status, the headers and the body of an answer."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANG_S)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    found = {"content-type": "application/json"} | dict(headers)
    link.request(method or ("GET" if body is None else "POST"), path, body, found)
    answer = link.getresponse()
    content = answer.read()
    link.close()
    return answer.status, answer.headers, content


def raw(server, path, body, *, small=False):
    """Return a socket that has sent a request."""
    body = json.dumps(body).encode()
    sock = socket.socket()
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(HANG_S)
    sock.connect(("127.0.0.1", server.port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    key = f"authorization: Bearer {KEYS[0]}\r\n"
    sock.sendall(f"{head}{key}content-length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def text_of(stream):
    """Return the text, the last finish reason and the usage of a stream's chunks."""
    texts, finishes, usages = [], [], []
    for chunk in stream:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            texts.append((delta.content if delta else choice.text) or "")
            finishes.append(choice.finish_reason)
        usages.append(chunk.usage)
    assert all(each is None for each in finishes[:-1])
    return "".join(texts), finishes[-1], usages[-1]


@pytest.mark.parametrize(
    ("options", "text", "finish"),
    [
        ({"prompt": "hé 🙂 ", "max_tokens": 20}, "hé 🙂 hé 🙂 h\ufffd", "length"),
        ({"prompt": "abcdef", "stop": "efab"}, "abcd", "stop"),
        ({"prompt": "abcdef", "stop": ["xy", "cdX", "de"]}, "abc", "stop"),
        ({"prompt": "ab cd</s>ef"}, "ab cd", "stop"),
        (
            {"prompt": "ab</s>cd", "max_tokens": 6, "extra_body": {"ignore_eos": True}},
            "abcdabcd",
            "length",
        ),
        ({"prompt": "x" * 2000, "max_tokens": 9}, "x" * 18, "length"),
        ({"prompt": "?a", "max_tokens": 30, "seed": 5}, None, "length"),
        ({"prompt": "?a", "max_tokens": 30, "temperature": 0}, None, "length"),
    ],
)
def test_a_stream_equals_the_whole_answer(client, options, text, finish):
    options = {"model": "toy"} | options
    whole = client.completions.create(**options)
    [choice] = whole.choices
    assert choice.finish_reason == finish
    assert choice.text == text or text is None
    streamed, end, _ = text_of(client.completions.create(**options, stream=True))
    usage = {"include_usage": True}
    *again, counts = text_of(
        client.completions.create(**options, stream=True, stream_options=usage)
    )
    assert (streamed, end) == (choice.text, finish) == tuple(again)
    assert counts == whole.usage
    assert counts.total_tokens == counts.prompt_tokens + counts.completion_tokens
    if finish == "length" and "max_tokens" in options:
        assert counts.completion_tokens == options["max_tokens"]


def test_chats_are_answered_whole_and_streamed(client):
    options = {"model": "toy", "messages": USER, "max_completion_tokens": 16}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", "hellohellohel")
    assert whole.usage.prompt_tokens == 6
    assert text_of(client.chat.completions.create(**options, stream=True))[:2] == (
        message.content,
        "length",
    )
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        [choice] = stream.current_completion_snapshot.choices
        assert (choice.message.role, choice.message.content) == (
            "assistant",
            message.content,
        )


def test_a_seed_draws_the_same_text_and_no_seed_draws_others(client):
    options = {"model": "toy", "prompt": "?", "max_tokens": 30, "temperature": 1.5}

    def draw(**more):
        return client.completions.create(**options, **more).choices[0].text

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert len({draw() for _ in range(5)}) > 1


def test_ids_and_log_probabilities_are_returned_on_request(server, client):
    extra = {"return_token_ids": True, "ignore_eos": True}
    options = {"model": "toy", "prompt": [9, EOS, 300], "max_tokens": 4}
    whole = client.completions.create(**options, logprobs=0, extra_body=extra)
    assert whole.prompt_token_ids == [9, EOS, 300]
    assert whole.choices[0].token_ids == [9, EOS, 300, 9]
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in (9, EOS, 300, 9)]
    assert whole.choices[0].logprobs.tokens == texts
    assert whole.choices[0].logprobs.token_logprobs == [0.0] * 4
    chunks = [*client.completions.create(**options, stream=True, extra_body=extra)]
    ids = [i for chunk in chunks for i in chunk.choices[0].token_ids]
    assert ids == [9, EOS, 300, 9]
    top = client.completions.create(**options, logprobs=1, temperature=0)
    assert top.choices[0].logprobs.top_logprobs[0] == {texts[0]: 0.0}
    chat = client.chat.completions.create(
        model="toy", messages=USER, max_tokens=2, logprobs=True
    )
    assert chat.choices[0].logprobs.content[0].logprob == 0.0
    _, _, content = send(server, "/tokenize", {"messages": USER})
    assert json.loads(content)["tokens"][0] == BOS
    _, _, content = send(server, "/tokenize", {"prompt": "ab"})
    assert json.loads(content) == {"count": 1, "tokens": tokenizer.encode("ab").ids}


P, M = {"prompt": "a"}, {"messages": USER}
BAD = [
    (COMPLETIONS, b"{", "body must be JSON"),
    (COMPLETIONS, b"\xff{}", "body must be JSON"),
    (COMPLETIONS, b'{"prompt": ' + b"9" * 5000 + b"}", "body must be JSON"),
    (COMPLETIONS, b"[" * 100_000, "body must be"),
    (COMPLETIONS, b"[" * 900 + b"]" * 900, "body must be"),
    (COMPLETIONS, b"", "body must be JSON"),
    (COMPLETIONS, [P], "body must be an object"),
    (COMPLETIONS, {}, "prompt must be a text or token ids, got None"),
    (COMPLETIONS, {"prompt": None}, "prompt must be"),
    (COMPLETIONS, {"prompt": ""}, "prompt must be"),
    (COMPLETIONS, {"prompt": []}, "prompt must be"),
    (COMPLETIONS, {"prompt": 3}, "prompt must be a text or token ids, got 3"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt must be"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt must be"),
    (COMPLETIONS, {"prompt": [1, 2.5]}, "prompt must be"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt and stop_ids must be tokens from 0 to"),
    (COMPLETIONS, {"prompt": [10**6]}, "prompt and stop_ids must be tokens from 0"),
    (COMPLETIONS, {"prompt": [10**300]}, "prompt and stop_ids must be tokens from 0"),
    (COMPLETIONS, {"prompt": "a\ud800"}, "prompt must have no lone surrogates"),
    (COMPLETIONS, {"prompt": "x" * 4200}, "prompt must be at most 2099 tokens, got 21"),
    (
        COMPLETIONS,
        P | {"max_tokens": 0},
        "max_tokens must be from 1 to 2099 after a prompt",
    ),
    (COMPLETIONS, P | {"max_tokens": 10**9}, "max_tokens must be from 1 to 2099"),
    (COMPLETIONS, P | {"max_tokens": 10**99}, "max_tokens must be of 64 bits"),
    (COMPLETIONS, P | {"max_tokens": True}, "max_tokens must be int | None, got True"),
    (COMPLETIONS, P | {"max_tokens": 1.0}, "max_tokens must be int | None, got 1.0"),
    (COMPLETIONS, P | {"max_completion_tokens": "1"}, "max_completion_tokens must be"),
    (
        COMPLETIONS,
        P | {"temperature": -1},
        "temperature must be a number from 0, got -1",
    ),
    (COMPLETIONS, P | {"temperature": float("nan")}, "temperature must be"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', "temperature must be"),
    (COMPLETIONS, P | {"temperature": 10**400}, "temperature must be"),
    (COMPLETIONS, P | {"temperature": "1"}, "temperature must be"),
    (COMPLETIONS, P | {"temperature": False}, "temperature must be"),
    (COMPLETIONS, P | {"top_p": 0}, "top_p must be above 0"),
    (COMPLETIONS, P | {"top_p": 1.1}, "top_p must be"),
    (COMPLETIONS, P | {"top_k": -2}, "top_k must be"),
    (COMPLETIONS, P | {"top_k": 10**20}, "top_k must be"),
    (COMPLETIONS, P | {"seed": 0.5}, "seed must be"),
    (COMPLETIONS, P | {"seed": 1 << 63}, "seed must be"),
    (COMPLETIONS, P | {"stop": ""}, "stop must be up to 16 texts"),
    (COMPLETIONS, P | {"stop": ["a", 3]}, "stop[1] must be str, got 3"),
    (COMPLETIONS, P | {"stop": ["a"] * 17}, "stop must be up to 16 texts"),
    (COMPLETIONS, P | {"stop": "a" * 1001}, "stop must be up to 16 texts"),
    (COMPLETIONS, P | {"stop": "\udfff"}, "stop must have no lone surrogates"),
    (COMPLETIONS, P | {"stream": "yes"}, "stream must be bool, got 'yes'"),
    (COMPLETIONS, P | {"stream": 1}, "stream must be bool, got 1"),
    (
        COMPLETIONS,
        P | {"stream_options": {"x": True}},
        "stream_options must be include_usage",
    ),
    (COMPLETIONS, P | {"stream_options": []}, "stream_options must be"),
    (COMPLETIONS, P | {"n": 2}, "n must be 1, got 2"),
    (COMPLETIONS, P | {"n": 1.0}, "n must be"),
    (COMPLETIONS, P | {"logprobs": 2}, "logprobs must be 0, or 1 with temperature 0"),
    (COMPLETIONS, P | {"logprobs": 1}, "logprobs must be 0, or 1 with temperature 0"),
    (COMPLETIONS, P | {"logprobs": True}, "logprobs must be"),
    (COMPLETIONS, P | {"user": 7}, "user must be str, got 7"),
    (COMPLETIONS, P | {"best_of": 2}, "'best_of' must not be given"),
    (COMPLETIONS, P | {"echo": True}, "'echo' must not be given"),
    (COMPLETIONS, P | {"presence_penalty": 1}, "'presence_penalty' must not be given"),
    (COMPLETIONS, P | {"\ud800": 1}, "must not be given"),
    (COMPLETIONS, P | {"x" * 9999: 1}, "must not be given"),
    (COMPLETIONS, P | M, "'messages' must not be given"),
    (CHATS, P, "'prompt' must not be given"),
    (CHATS, {}, "messages must be"),
    (CHATS, {"messages": []}, "messages must be"),
    (CHATS, {"messages": "hi"}, "messages must be"),
    (CHATS, {"messages": [3]}, "messages[0] must be dict"),
    (
        CHATS,
        {"messages": [{"role": "user"}]},
        "messages must be at least one, with role (sys",
    ),
    (
        CHATS,
        {"messages": [{**USER[0], "role": "tool"}]},
        "messages must be at least one",
    ),
    (
        CHATS,
        {"messages": [{**USER[0], "tool_calls": [1]}]},
        "messages[0]['tool_calls'] must",
    ),
    *(
        (
            CHATS,
            {"messages": [{**USER[0], "content": content}]},
            "messages[0]['content'] must be",
        )
        for content in ([], [3], [{"type": "text"}], [{"type": "image_url"}])
    ),
    (
        CHATS,
        {"messages": [{**USER[0], "content": "\ud900"}]},
        "messages must have no lone",
    ),
    (
        CHATS,
        {"messages": [{**USER[0], "role": "developer"}]},
        "chat template: not them",
    ),
    (CHATS, M | {"tools": [{"type": "function"}]}, "'tools' must not be given"),
    (CHATS, M | {"top_logprobs": 1}, "top_logprobs must be"),
    (CHATS, M | {"logprobs": 1}, "logprobs must be true or false, got 1"),
    ("/tokenize", {"messages": USER, "x": 1}, "'x' must not be given"),
    ("/tokenize", {}, "prompt must be"),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
def test_bad_input_is_refused_in_a_sentence_with_the_field(server, path, body, message):
    status, headers, content = send(server, path, body)
    error = json.loads(content)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), content
    assert headers["content-type"] == "application/json"
    assert error["message"].startswith(message) or message in error["message"], error
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, P | {"model": "other"}, 404, "model must be toy, got 'other'"),
        (COMPLETIONS, P | {"model": "\ud800"}, 400, "model must have no lone"),
        ("/v1/models/other", None, 404, "model must be toy, got 'other'"),
        ("/v1/embeddings", P, 404, "Not Found"),
        (COMPLETIONS, None, 405, "Method Not Allowed"),
        ("/health", P, 405, "Method Not Allowed"),
        (COMPLETIONS, b" " * (5 << 20), 413, "body must be at most 4194304 bytes"),
    ],
)
def test_other_errors_have_their_status(server, path, body, status, message):
    found, _, content = send(server, path, body)
    assert (found, json.loads(content)["error"]["message"][: len(message)]) == (
        status,
        message,
    )


def test_forms_of_bodies_that_are_no_json(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, _, content = send(server, COMPLETIONS, P, {"content-type": kind})
        assert (status, b"content-type must be application/json" in content) == (
            415,
            True,
        )
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    assert send(server, COMPLETIONS, P | {"max_tokens": 1}, kind)[0] == 200


def test_values_that_ask_for_nothing_are_accepted(server):
    body = P | {"max_tokens": 1, "suffix": None, "temperature": 1e-300, "seed": -5}
    body |= {"frequency_penalty": 0, "presence_penalty": 0.0, "best_of": 1, "n": 1}
    assert send(server, COMPLETIONS, body)[0] == 200
    message = USER[0] | {"tool_calls": None, "refusal": None, "name": "me"}
    body = {"messages": [message], "max_tokens": 1, "tools": None, "logprobs": False}
    assert (
        send(server, CHATS, body | {"stream_options": {}, "top_logprobs": 0})[0] == 200
    )


def test_a_content_of_several_texts_is_one_text(client):
    texts = ["one", "two"]
    parts = [{"type": "text", "text": text} for text in texts]
    whole, divided = (
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": content}], max_tokens=30
        )
        for content in ("\n".join(texts), parts)
    )
    assert divided.choices[0].message.content == whole.choices[0].message.content
    assert divided.usage == whole.usage


def test_the_client_raises_the_errors_of_openai(server, guarded, client):
    with pytest.raises(openai.BadRequestError, match="n must be") as caught:
        client.completions.create(model="toy", prompt="a", n=3)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    with connect(guarded, "wrong") as other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    server.front._options = FrontOptions(max_queue=0)
    try:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="toy", prompt="a")
        assert int(caught.value.response.headers["retry-after"]) > 0
    finally:
        server.front._options = FrontOptions()


def test_models_are_listed(client):
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ("toy", 2100)
    assert client.models.retrieve("toy") == model


def test_keys_are_needed_but_for_health_and_own_metrics(guarded):
    for path in ("/v1/models", COMPLETIONS, CHATS, "/tokenize"):
        body = None if path == "/v1/models" else P
        for given in ("", "Bearer", "Bearer x", f"Basic {KEYS[0]}", "Bearer \xff"):
            headers = {"authorization": given}
            status, _, content = send(guarded, path, body, headers)
            assert status == 401, (path, given)
            assert json.loads(content)["error"]["code"] == "invalid_api_key"
    for key in KEYS:
        given = {"authorization": f"Bearer {key}".encode()}
        assert send(guarded, "/v1/models", None, given)[0] == 200
    assert send(guarded, "/health")[0] == 200
    assert b"vllm:num_requests_running" in send(guarded, "/metrics")[2]
    forwarded = {"x-forwarded-for": "10.0.0.7"}
    assert send(guarded, "/metrics", headers=forwarded)[0] == 401


def test_a_server_that_cannot_serve_says_so_everywhere(server):
    server.front._ended = "restarting"
    try:
        status, _, content = send(server, "/health")
        assert (status, json.loads(content)["reason"]) == (503, "restarting")
        for path, body in (("/v1/models", None), (COMPLETIONS, P), (CHATS, M)):
            status, headers, content = send(server, path, body)
            assert (status, b"the server" in content) == (503, True), path
            assert int(headers["retry-after"]) > 0
    finally:
        server.front._ended = ""
    assert send(server, "/health")[0] == 200


def test_a_request_without_a_token_in_time_fails_with_its_status(server):
    with closed_gate(server):
        for more in ({}, {"stream": True}):
            headers = {"x-request-timeout": "0.1"}
            status, _, content = send(server, COMPLETIONS, P | more, headers)
            assert (status, json.loads(content)["error"]["code"]) == (504, "timeout")
    for given in ("", "0", "-1", "nan", "1e999", "x"):
        status, _, content = send(server, COMPLETIONS, P, {"x-request-timeout": given})
        assert (status, b"x-request-timeout must be" in content) == (400, True), given


def test_a_stream_that_waits_has_comments_and_one_that_fails_an_error(server, client):
    with closed_gate(server):
        sock = raw(server, COMPLETIONS, LONG | {"max_tokens": 3})
        received = b""
        while received.count(b": waiting\n\n") < 2:
            received += sock.recv(1 << 16)
    while not received.endswith(b"0\r\n\r\n"):
        received += sock.recv(1 << 16)
    sock.close()
    assert b'"text": "ab' in received
    assert received.count(b"data: [DONE]\n\n") == 1
    stream = client.completions.create(model="toy", prompt="ab", stream=True)
    next(iter(stream))
    error = RejectedError(503, "ended", "the server has ended.")
    server.ask(server.front._fail_all, error)
    with pytest.raises(openai.APIError, match="the server has ended"):
        for _ in stream:
            pass
    until(lambda: server.num_held()[:2] == (0, 0))


def test_a_client_that_hangs_up_ends_its_request(server):
    until(lambda: server.num_held() == (0, 0, 0))
    with closed_gate(server):
        num_steps = server.engine.num_steps
        bodies = [LONG, LONG | {"stream": False}, M | {"max_tokens": 2000}] * 20
        socks = [
            raw(server, CHATS if "messages" in b else COMPLETIONS, b) for b in bodies
        ]
        until(lambda: sum(server.num_held()[:2]) == len(bodies))
        flights = server.ask(
            lambda: [
                f for found in server.front._flights.values() for f in found.values()
            ]
        )
        for sock in socks:
            sock.close()
        until(lambda: server.num_held()[1:] == (0, 0))
        assert {flight.finish for flight in flights} == {"cancel"}
    until(lambda: server.num_held() == (0, 0, 0))
    assert server.engine.num_steps - num_steps < 20


def test_a_client_that_does_not_read_is_cut_off(guarded):
    """What it has not read is at most one piece beyond the kernel's buffers."""
    body = {"prompt": "ab</s>" * 100, "max_tokens": 1200, "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    socks = [raw(guarded, COMPLETIONS, body, small=True) for _ in range(4)]
    until(lambda: guarded.num_held()[2] == len(socks))
    until(lambda: guarded.num_held() == (0, 0, 0))
    for sock in socks:
        sock.close()


def test_headers_that_do_not_come_are_not_waited_for(guarded):
    with socket.create_connection(("127.0.0.1", guarded.port), HANG_S) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nx: ")
        assert sock.recv(100) == b""
    with socket.create_connection(("127.0.0.1", guarded.port), HANG_S) as sock:
        for _ in range(2):
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"}}"):
                received += sock.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 401")
        sock.sendall(b"G")
        assert sock.recv(1 << 16) == b""


def test_what_is_no_http_is_answered(server):
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", server.port), HANG_S) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
        sock.sendall(head + b"content-type: application/json\r\n\r\n{")
    until(lambda: server.num_held() == (0, 0, 0))


def test_a_server_that_ends_finishes_its_streams_first(tmp_path):
    with served(tmp_path) as server, closed_gate(server):
        sock = raw(server, COMPLETIONS, LONG | {"max_tokens": 500})
        until(lambda: server.num_held()[0] == 1)
        server.http.should_exit = True

        def is_refused():
            try:
                socket.create_connection(("127.0.0.1", server.port), HANG_S).close()
            except ConnectionRefusedError:
                return True
            return False

        until(is_refused)
        server.engine.gate.set()
        received = b"".join(iter(lambda: sock.recv(1 << 16), b""))
        assert received.count(b"data: [DONE]") == 1
        sock.close()
