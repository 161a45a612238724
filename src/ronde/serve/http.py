"""OpenAI's HTTP interface of a front, and the server for it."""

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple, cast

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ronde.errors import UsageError
from ronde.plain_values import PlainValueError, from_plain, shorten, to_plain
from ronde.serve.front import Flight, Front, RejectedError
from ronde.serve.requests import InferenceRequest, Token
from ronde.serve.text import ModelText

_MAX_BODY, _BODY_S = 4 << 20, 60.0
_MAX_TOKENS = 1024  # where a request gives none
_LEAST_TEMPERATURE = 1e-4  # scores divided by less may overflow
_SHORT = 4096  # characters; longer texts are encoded in a thread
_ROLES = ("system", "developer", "user", "assistant")
_LIMIT = "x-request-timeout"
_NEUTRAL: dict[str, object] = {  # clients send these, and ask for nothing by them
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), 0),
    "repetition_penalty": 1,
    "best_of": 1,
    "echo": False,
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
}


class HttpOptions(NamedTuple):
    """The options of the interface and of its server."""

    model: str  # the name for clients
    api_keys: tuple[str, ...] = ()  # any client may call if empty
    comment_s: float = 15.0  # a stream has at least a comment so often
    header_s: float = 10.0  # for the header of a request to arrive
    write_s: float = 60.0  # for a client to read


class _Fields(NamedTuple):
    """The fields of a body; absent ones have OpenAI's defaults."""

    model: str = ""
    prompt: Any = None  # a text or token ids
    messages: tuple[dict[str, str], ...] = ()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_options: dict[str, bool] = {}  # noqa: RUF012  it is not changed
    n: int = 1
    logprobs: int | bool | None = None
    top_logprobs: int = 0
    user: str = ""
    ignore_eos: bool = False
    return_token_ids: bool = False


_COMPLETION = tuple(n for n in _Fields._fields if n not in ("messages", "top_logprobs"))
_CHAT = tuple(name for name in _Fields._fields if name != "prompt")


def _parse(body: bytes, known: Sequence[str]) -> _Fields:
    """Return the fields of a body; the front checks the limits of numbers."""
    try:
        given: Any = json.loads(body, object_hook=_simplify)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"body must be JSON: {error}.") from None
    if not isinstance(given, dict):
        raise UsageError(f"body must be an object, got {shorten(given)}.")
    given = cast("dict[str, Any]", given)
    for name, value in _NEUTRAL.items():
        if name in given and given[name] == value:
            del given[name]
    for name, value in given.items():
        _require_plain(name, value, known)
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    plain = cast("dict[str, Any]", to_plain(_Fields())) | given
    try:
        fields = from_plain(_Fields, plain, "body")
    except PlainValueError as error:
        raise UsageError(f"{error}".removeprefix("body.")) from None
    for name, (rule, is_kept) in _rules(fields).items():
        if name in known and not is_kept:
            value = shorten(getattr(fields, name))
            raise UsageError(f"{name} must be {rule}, got {value}.")
    return fields


def _simplify(values: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a body without nulls, and a content of texts as one text."""
    kept = {name: value for name, value in values.items() if value is not None}
    parts = kept.get("content")
    if isinstance(parts, list):
        texts = [_text_of(each) for each in cast("list[Any]", parts)]
        if texts and all(isinstance(text, str) for text in texts):
            kept["content"] = "\n".join(texts)
    return kept


def _text_of(part: Any) -> Any:  # noqa: ANN401  of JSON
    fields = cast("dict[str, Any]", part if isinstance(part, dict) else {})
    is_text = fields.keys() == {"type", "text"} and fields["type"] == "text"
    return fields["text"] if is_text else None


def _require_plain(name: str, value: object, known: Sequence[str]) -> None:
    if name not in known:
        text = f"{shorten(name)} must not be given; known are {', '.join(known)}."
        raise UsageError(text)
    if isinstance(value, int) and value.bit_length() > 63:
        raise UsageError(f"{name} must be of 64 bits, got {shorten(value)}.")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} must have no lone surrogates.") from None


def _rules(fields: _Fields) -> dict[str, tuple[str, object]]:
    """Return the rule of each field with one, and True if it is kept."""
    prompt, messages, logprobs = fields.prompt, fields.messages, fields.logprobs
    if isinstance(prompt, list):
        prompt = {*map(type, cast("list[object]", prompt))} == {int} and "ids"
    if not messages and logprobs == 1 and fields.temperature > 0:
        logprobs = 2  # the likeliest token is not known
    chat = (
        each.keys() - {"name"} == {"role", "content"} and each["role"] in _ROLES
        for each in messages
    )
    return {
        "prompt": ("a text or token ids", messages or (prompt and type(prompt) is str)),
        "messages": (
            f"at least one, with role ({', '.join(_ROLES)}) and content",
            (messages or prompt) and all(chat),
        ),
        "stop": (
            "up to 16 texts of 1 to 1000 characters",
            len(fields.stop) <= 16 and all(0 < len(s) <= 1000 for s in fields.stop),
        ),
        "stream_options": (
            "include_usage alone",
            fields.stream_options.keys() <= {"include_usage"},
        ),
        "n": ("1", fields.n == 1),
        "logprobs": (
            "true or false" if messages else "0, or 1 with temperature 0",
            logprobs is None
            or ((type(logprobs) is bool) == bool(messages) and logprobs < 2),
        ),
        "top_logprobs": ("0", fields.top_logprobs == 0),
    }


class _Answer:
    """The answer to one request, as its tokens come."""

    def __init__(
        self, flight: Flight, text: ModelText, fields: _Fields, model: str
    ) -> None:
        self._flight, self._text, self._fields = flight, text, fields
        self._stream, self._num_read = text.stream(fields.stop), 0
        self._is_chat = bool(fields.messages)
        has_usage = fields.stream and fields.stream_options.get("include_usage")
        self._more: dict[str, object] = {"usage": None} if has_usage else {}
        kind = f"chat.completion{'.chunk' if fields.stream else ''}"
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def raise_failure(self) -> None:
        """Raise the request's error once all tokens before it are read."""
        flight, error = self._flight, self._flight.error
        if flight.finish == "timeout" and not flight.tokens:
            error = RejectedError(504, "timeout", "the request got no token in time.")
        if error is not None and self._num_read == len(flight.tokens):
            raise error

    async def parts(
        self, wait_s: float | None = None
    ) -> AsyncIterator[tuple[str, Sequence[Token], str | None]]:
        """Yield text, tokens and finish; empty ones if none come for ``wait_s``."""
        flight, finish = self._flight, None
        while finish is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await flight.more(self._num_read)
            self.raise_failure()
            text, start = "", self._num_read
            for token in flight.tokens[start:]:
                self._num_read += 1
                text += "" if token.finish == "stop" else self._stream.add(token.token)
                if self._stream.is_stopped:
                    break
            else:
                finish = flight.finish
                text += self._stream.end() if finish else ""
            if self._stream.is_stopped:
                flight.cancel(finish := "stop")
            yield text, flight.tokens[start : self._num_read], finish

    async def whole(self) -> dict[str, object]:
        parts = [part async for part in self.parts()]
        text, tokens = "".join(part[0] for part in parts), self._flight.tokens
        body = self._body(text, tokens[: self._num_read], parts[-1][-1])
        return body | {"usage": self._usage()}

    async def events(self, wait_s: float) -> AsyncIterator[bytes]:
        if self._is_chat:
            yield _event(self._body("", role="assistant"))
        try:
            async for text, tokens, finish in self.parts(wait_s):
                if text or (tokens and self._fields.return_token_ids):
                    yield _event(self._body(text, tokens))
                if finish is not None:
                    yield _event(self._body(finish=finish))
                elif not tokens:
                    yield b": waiting\n\n"
            if self._more:
                rest: dict[str, object] = {"choices": [], "usage": self._usage()}
                yield _event(self._head | rest)
        except RejectedError as error:
            yield _event(_describe(error)[1])
        yield b"data: [DONE]\n\n"

    def _body(
        self,
        text: str | None = None,
        tokens: Sequence[Token] = (),
        finish: str | None = None,
        **delta: str,
    ) -> dict[str, object]:
        """Return an answer or a part of it; without text it is the last part."""
        choice: dict[str, object] = {"index": 0, "text": text or ""}
        if self._is_chat:
            delta |= {} if text is None else {"content": text}
            choice = {"index": 0, "delta": delta}
        if self._is_chat and not self._fields.stream:
            choice = {"index": 0, "message": delta | {"role": "assistant"}}
        choice |= {"logprobs": self._logprobs(tokens), "finish_reason": finish}
        if self._fields.return_token_ids:
            choice["token_ids"] = [each.token for each in tokens]
        return self._head | {"choices": [choice]} | self._more

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, object] | None:
        wanted = self._fields.logprobs
        if wanted is None or wanted is False:
            return None
        texts = [self._text.token_text(each.token) for each in tokens]
        values = [each.logprob for each in tokens]
        if self._is_chat:
            found = zip(texts, values, strict=True)
            rest = {"bytes": None, "top_logprobs": list[object]()}
            return {"content": [{"token": t, "logprob": v} | rest for t, v in found]}
        top = [{t: v} for t, v in zip(texts, values, strict=True)] if wanted else None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top}

    def _usage(self) -> dict[str, int]:
        num_prompt, num_made = self._flight.num_prompt, self._num_read
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_made}
        return usage | {"total_tokens": num_prompt + num_made}


class _Api:
    """The routes."""

    def __init__(self, front: Front, text: ModelText, options: HttpOptions) -> None:
        self._front, self._text, self._options = front, text, options

    async def answer(self, request: Request, *, is_chat: bool) -> Response:
        key, limit = self._authorize(request), request.headers.get(_LIMIT)
        if limit is not None and not re.fullmatch(
            r"(?=.*[1-9])\d{1,9}(\.\d{1,9})?", limit
        ):
            raise UsageError(f"{_LIMIT} must be seconds, got {shorten(limit)}.")
        fields, prompt = await self._read(request, _CHAT if is_chat else _COMPLETION)
        flight = self._front.submit(
            self._request(fields, prompt),
            key=key,
            timeout_s=None if limit is None else float(limit),
        )
        request.state.flight = flight  # its connection cancels it, if not closed yet
        if await request.is_disconnected():
            flight.cancel()
        answer = _Answer(flight, self._text, fields, self._options.model)
        if not fields.stream:
            ids = {"prompt_token_ids": prompt} if fields.return_token_ids else {}
            return _response(await answer.whole() | ids)
        with suppress(TimeoutError):  # a failure before the first token has its status
            async with asyncio.timeout(self._options.comment_s):
                await flight.more(0)
        answer.raise_failure()
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        events = answer.events(self._options.comment_s)
        return StreamingResponse(events, 200, headers, "text/event-stream")

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        self._require_model(asked := request.path_params.get("model", ""))
        health, capacity = self._front.health(), self._front.capacity
        if not health.is_ready or capacity is None:
            raise RejectedError(503, "not_serving", f"the server is {health.reason}.")
        model = {"id": self._options.model, "object": "model", "created": 0}
        model |= {"owned_by": "ronde", "max_model_len": capacity.max_len}
        return _response(model if asked else {"object": "list", "data": [model]})

    async def health(self, _request: Request) -> Response:
        health = self._front.health()
        return _response(to_plain(health), 200 if health.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        client, is_forwarded = request.client, "x-forwarded-for" in request.headers
        if is_forwarded or not client or not ip_address(client.host).is_loopback:
            self._authorize(request)
        *_, num_running, num_waiting, kv_usage = self._front.health()
        text = self._front.metrics.render(num_running, num_waiting, kv_usage)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        self._authorize(request)
        _, tokens = await self._read(request, ("prompt", "messages", "model"))
        return _response({"count": len(tokens), "tokens": tokens})

    def _authorize(self, request: Request) -> str:
        """Return the hash of the client's key."""
        header = request.headers.get("authorization", "").encode("latin-1")
        scheme, _, given = header.partition(b" ")
        keys = [key.encode() for key in self._options.api_keys]
        found = [hmac.compare_digest(given, key) for key in keys]
        if keys and not (any(found) and scheme.lower() == b"bearer"):
            text = "authorization must be Bearer and an API key of this server."
            raise HTTPException(401, text, {"www-authenticate": "Bearer"})
        return hashlib.sha256(given).hexdigest() if keys else ""

    def _require_model(self, name: str) -> None:
        if name not in ("", own := self._options.model):
            raise HTTPException(404, f"model must be {own}, got {shorten(name)}.")

    async def _read(
        self, request: Request, known: Sequence[str]
    ) -> tuple[_Fields, tuple[int, ...]]:
        """Return the fields of a body and the ids of its prompt."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind.lower() != "application/json":
            rule = "content-type must be application/json"
            raise HTTPException(415, f"{rule}, got {shorten(kind)}.")
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BODY:
                        rule = f"body must be at most {_MAX_BODY} bytes"
                        raise HTTPException(413, f"{rule}, got more.")
        except TimeoutError:
            raise HTTPException(408, f"body must come in {_BODY_S:g} s.") from None
        fields = _parse(bytes(body), known)
        self._require_model(fields.model)
        if isinstance(fields.prompt, list):
            return fields, tuple(cast("list[int]", fields.prompt))
        text, is_chat = fields.prompt, bool(fields.messages)
        if is_chat:
            text = self._text.render_chat(fields.messages)
        encode = partial(self._text.encode, text, adds_special=not is_chat)
        is_short = len(text) <= _SHORT
        return fields, encode() if is_short else await asyncio.to_thread(encode)

    def _request(self, fields: _Fields, prompt: tuple[int, ...]) -> InferenceRequest:
        room, capacity = _MAX_TOKENS, self._front.capacity
        if capacity is not None:
            most = min(capacity.max_len, capacity.num_blocks * capacity.block_tokens)
            room = most - len(prompt)
            if room < 1:
                rule = f"prompt must be at most {most - 1} tokens"
                raise UsageError(f"{rule}, got {len(prompt)}.")
        asked = (
            fields.max_completion_tokens,
            fields.max_tokens,
            min(room, _MAX_TOKENS),
        )
        is_greedy = 0 <= fields.temperature < _LEAST_TEMPERATURE
        return InferenceRequest(
            id=0,
            prompt=prompt,
            max_tokens=next(each for each in asked if each is not None),
            temperature=0.0 if is_greedy else fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            seed=secrets.randbits(63) if fields.seed is None else fields.seed,
            stop_ids=() if fields.ignore_eos else self._text.stop_ids,
        )


def make_app(front: Front, text: ModelText, options: HttpOptions) -> Starlette:
    """Return the application; ``ApiServer`` serves it."""
    api = _Api(front, text, options)
    complete, chat = (partial(api.answer, is_chat=is_chat) for is_chat in (False, True))
    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{model:path}", api.models),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    kinds = (HTTPException, UsageError, RejectedError, RecursionError, ClientDisconnect)
    handlers = dict.fromkeys((*kinds, Exception), _on_error)
    return Starlette(routes=routes, exception_handlers=handlers)


class _Connection(H11Protocol):
    """A connection that ends if its client is slow, and cancels its request then."""

    def __init__(self, options: HttpOptions, **others: Any) -> None:  # noqa: ANN401
        super().__init__(**others)
        self._options = options
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # one piece at most is not sent
        self._limit(self._options.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        super().connection_lost(exc)
        scope: Any = self.cycle.scope if self.cycle else {"state": {}}
        if (flight := scope["state"].get("flight")) is not None:
            flight.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_arriving = self.conn.their_state is h11.IDLE  # the header is not complete
        if is_arriving and self._timer is None:
            self._limit(self._options.header_s)
        elif not is_arriving and not self.flow.write_paused:
            self._limit(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit(self._options.write_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit(None)

    def _limit(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self.transport.abort)


class ApiServer(uvicorn.Server):
    """Serves an application: ``serve(sockets=[bound])``, until ``should_exit``.

    It answers the requests in progress first, unless ``force_exit``.
    """

    def __init__(self, app: Starlette, options: HttpOptions) -> None:
        http = cast("type[asyncio.Protocol]", partial(_Connection, options))
        super().__init__(
            uvicorn.Config(
                app, http=http, ws="none", lifespan="off", interface="asgi3",
                log_config=None, log_level="error", access_log=False,
                proxy_headers=False, server_header=False,
                limit_concurrency=4096, timeout_keep_alive=30,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the program."""
        yield


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(json.dumps(value), status, headers, "application/json")


def _describe(error: Exception) -> tuple[int, dict[str, object]]:
    """Return the status of an error, and its description in OpenAI's form."""
    status, code, text = 500, "internal_error", "the server failed; its log has more."
    if isinstance(error, HTTPException):
        status, code, text = error.status_code, None, error.detail
    elif isinstance(error, RejectedError):
        status, code, text = error.status, error.reason, f"{error}"
    elif isinstance(error, UsageError | RecursionError | ClientDisconnect):
        status, code, text = 400, None, f"{error}"
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(status, code)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    param = text.partition(" must ")[0] if " must " in text else None
    found = {"message": text, "type": kind, "param": param, "code": code}
    return status, {"error": found}


async def _on_error(_request: Request, error: Exception) -> Response:
    status, body = _describe(error)
    headers = dict(getattr(error, "headers", None) or {})
    if (after_s := getattr(error, "retry_after_s", None)) is not None:
        headers["retry-after"] = f"{after_s}"
    return _response(body, status, headers)
