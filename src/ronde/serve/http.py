"""OpenAI's HTTP interface of a front, and the server for it."""

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
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
from ronde.plain_values import shorten, to_plain
from ronde.serve.front import Flight, Front, RejectedError
from ronde.serve.requests import InferenceRequest, Token
from ronde.serve.text import ModelText

_MAX_BODY, _BODY_S = 4 << 20, 60.0
_MAX_TOKENS = 1024  # where a request gives none
_LEAST_TEMPERATURE = 1e-4  # scores divided by less may overflow
_SHORT = 4096  # characters; longer texts are encoded in a thread
_ROLES = ("system", "developer", "user", "assistant")
_FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "user"), (str,)),
    **dict.fromkeys(("stream", "ignore_eos", "return_token_ids"), (bool,)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k", "seed"), (int,)),
    **dict.fromkeys(("temperature", "top_p"), (int, float)),
    "stop": (str, list), "stream_options": (dict,), "n": (int,),
}
_COMPLETION = _FIELDS | {"prompt": (str, list), "logprobs": (int,)}
_CHAT = _FIELDS | {"messages": (list,), "logprobs": (bool,), "top_logprobs": (int,)}
_TOKENIZE = {"model": (str,), "prompt": (str, list), "messages": (list,)}
_LIMITS = {
    "n": (1, 1), "logprobs": (0, 1), "top_logprobs": (0, 0), "temperature": (0, 2),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (1, 1 << 31)),
    "top_k": (0, 1 << 31), "top_p": (0, 1), "seed": (-1 << 63, (1 << 63) - 1),
}
_TYPES = {
    str: "a text", list: "a list", dict: "an object", bool: "true or false",
    int: "a whole number", float: "a number",
}
_NEUTRAL: dict[str, Any] = {  # values of other fields that ask for nothing
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    "best_of": 1, "echo": False, "suffix": "", "logit_bias": {}, "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"},
}  # fmt: skip


class HttpOptions(NamedTuple):
    """The options of the interface and of its server."""

    model: str  # the name for clients
    api_keys: tuple[str, ...] = ()  # any client may call if empty
    comment_s: float = 15.0  # a stream has at least a comment so often
    header_s: float = 10.0  # for the header of a request to arrive
    write_s: float = 60.0  # for a client to read


class _Piece(NamedTuple):
    text: str = ""
    tokens: Sequence[Token] = ()
    finish: str | None = None


class _Answer:
    """The answer to one request, as its tokens come."""

    def __init__(
        self,
        flight: Flight,
        text: ModelText,
        head: dict[str, Any],
        fields: dict[str, Any],
    ) -> None:
        self._flight, self._text, self._head, self._fields = flight, text, head, fields
        self._stream, self._num_read = text.stream(fields.get("stop", ())), 0
        has_usage = fields.get("stream_options", {}).get("include_usage")
        self._more: dict[str, object] = {"usage": None} if has_usage else {}

    def raise_failure(self) -> None:
        """Raise the request's error once all tokens before it are read."""
        flight, error = self._flight, self._flight.error
        if flight.finish == "timeout" and not flight.tokens:
            error = RejectedError(504, "timeout", "the request got no token in time.")
        if error is not None and self._num_read == len(flight.tokens):
            raise error

    async def pieces(self, wait_s: float | None = None) -> AsyncIterator[_Piece]:
        """Yield the parts; an empty one if nothing has come for ``wait_s``."""
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
            yield _Piece(text, flight.tokens[start : self._num_read], finish)

    async def whole(self) -> dict[str, object]:
        pieces = [piece async for piece in self.pieces()]
        text, finish = "".join(piece.text for piece in pieces), pieces[-1].finish
        piece = _Piece(text, self._flight.tokens[: self._num_read], finish)
        message = {"message": {"role": "assistant", "content": text}}
        return self._body(piece, message) | {"usage": self._usage()}

    async def events(self, wait_s: float) -> AsyncIterator[bytes]:
        yield _event(
            self._body(_Piece(), {"delta": {"role": "assistant", "content": ""}})
        )
        try:
            async for piece in self.pieces(wait_s):
                text, tokens, finish = piece
                if text or (tokens and "return_token_ids" in self._fields):
                    delta = {"delta": {"content": text}}
                    yield _event(self._body(_Piece(text, tokens), delta))
                if finish is not None:
                    yield _event(self._body(_Piece(finish=finish), {"delta": {}}))
                elif not tokens:
                    yield b": waiting\n\n"
            if self._more:
                rest: dict[str, object] = {"choices": [], "usage": self._usage()}
                yield _event(self._head | rest)
        except RejectedError as error:
            yield _event(_describe(error)[1])
        yield b"data: [DONE]\n\n"

    def _body(self, piece: _Piece, message: dict[str, Any]) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "finish_reason": piece.finish}
        choice |= message if "messages" in self._fields else {"text": piece.text}
        choice["logprobs"] = self._logprobs(piece.tokens)
        if self._fields.get("return_token_ids"):
            choice["token_ids"] = [token.token for token in piece.tokens]
        return self._head | {"choices": [choice]} | self._more

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, object] | None:
        if (wanted := self._fields.get("logprobs", False)) is False:
            return None
        pairs = [(self._text.token_text(each.token), each.logprob) for each in tokens]
        if "messages" in self._fields:
            rest: dict[str, object] = {"bytes": None, "top_logprobs": []}
            return {"content": [{"token": t, "logprob": p} | rest for t, p in pairs]}
        texts, values = [text for text, _ in pairs], [value for _, value in pairs]
        top = [{text: value} for text, value in pairs] if wanted else None
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
        key = self._authorize(request)
        fields = await self._read(request, _CHAT if is_chat else _COMPLETION)
        prompt, limit_s = await self._encode(fields), _limit_s(request)
        flight = self._front.submit(
            self._request(fields, prompt), key=key, timeout_s=limit_s
        )
        request.state.flight = flight  # its connection cancels it
        has_stream: bool = fields.get("stream", False)
        kind = "chat.completion.chunk" if has_stream else "chat.completion"
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
        }
        answer = _Answer(flight, self._text, head, fields)
        if not has_stream:
            ids = {"prompt_token_ids": prompt} if "return_token_ids" in fields else {}
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
        name = self._options.model
        self._require_model(asked := request.path_params.get("name", ""))
        if not (health := self._front.health()).is_ready:
            raise RejectedError(503, "not_serving", f"the server is {health.reason}.")
        capacity = self._front.capacity
        model = {"id": name, "object": "model", "created": 0, "owned_by": "ronde"}
        model |= {"max_model_len": capacity.max_len if capacity else None}
        return _response(model if asked else {"object": "list", "data": [model]})

    async def health(self, _request: Request) -> Response:
        health = self._front.health()
        return _response(to_plain(health), 200 if health.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        is_forwarded = "x-forwarded-for" in request.headers
        client = request.client
        if is_forwarded or not client or not ip_address(client.host).is_loopback:
            self._authorize(request)
        *_, num_running, num_waiting, kv_usage = self._front.health()
        text = self._front.metrics.render(num_running, num_waiting, kv_usage)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def tokenize(self, request: Request) -> Response:
        self._authorize(request)
        tokens = await self._encode(await self._read(request, _TOKENIZE))
        return _response({"count": len(tokens), "tokens": tokens})

    def _authorize(self, request: Request) -> str:
        """Return the hash of the client's key."""
        header = request.headers.get("authorization", "").encode("latin-1")
        scheme, _, given = header.partition(b" ")
        known = [key.encode() for key in self._options.api_keys]
        found = [hmac.compare_digest(given, key) for key in known]
        if known and not (any(found) and scheme.lower() == b"bearer"):
            text = "authorization must be Bearer and an API key of this server."
            raise HTTPException(401, text, {"www-authenticate": "Bearer"})
        return hashlib.sha256(given).hexdigest() if known else ""

    def _require_model(self, name: str) -> None:
        if name not in ("", own := self._options.model):
            raise HTTPException(404, f"model must be {own}, got {shorten(name)}.")

    async def _read(
        self, request: Request, known: dict[str, tuple[type, ...]]
    ) -> dict[str, Any]:
        """Return the fields of a request's body; those of ``known`` types alone."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            text = f"content-type must be application/json, got {shorten(kind)}."
            raise HTTPException(415, text)
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BODY:
                        raise HTTPException(
                            413, f"body must be at most {_MAX_BODY} bytes."
                        )
            given: Any = json.loads(body)
        except TimeoutError:
            raise HTTPException(408, f"body must come within {_BODY_S:g} s.") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"body must be JSON: {error}.") from None
        if not isinstance(given, dict):
            raise UsageError(f"body must be an object, got {shorten(given)}.")
        items = cast("dict[str, Any]", given).items()
        fields = {
            name: value
            for name, value in items
            if value is not None and (name in known or _NEUTRAL.get(name) != value)
        }
        _require_valid(fields, known)
        self._require_model(fields.get("model", ""))
        return fields

    async def _encode(self, fields: dict[str, Any]) -> tuple[int, ...]:
        given: Any = fields.get("prompt", "")
        if "messages" in fields:
            chat = [_message(n, each) for n, each in enumerate(fields["messages"])]
            given = self._text.render_chat(chat)
        if isinstance(given, list) and all(type(n) is int for n in given):
            return tuple(cast("list[int]", given))
        if not given or not isinstance(given, str):
            text = f"prompt must be a text or token ids, got {shorten(given)}."
            raise UsageError(text)
        encode = partial(self._text.encode, given, adds_special="prompt" in fields)
        return encode() if len(given) <= _SHORT else await asyncio.to_thread(encode)

    def _request(
        self, fields: dict[str, Any], prompt: tuple[int, ...]
    ) -> InferenceRequest:
        room, capacity = _MAX_TOKENS, self._front.capacity
        if capacity is not None:
            most = min(capacity.max_len, capacity.num_blocks * capacity.block_tokens)
            room = most - len(prompt)
            if room < 1:
                text = f"prompt must be at most {most - 1} tokens, got {len(prompt)}."
                raise UsageError(text)
        asked = fields.get("max_tokens", min(room, _MAX_TOKENS))
        temperature = float(fields.get("temperature", 1))  # as OpenAI's
        return InferenceRequest(
            id=0,
            prompt=prompt,
            max_tokens=fields.get("max_completion_tokens", asked),
            temperature=0.0 if 0 < temperature < _LEAST_TEMPERATURE else temperature,
            top_k=fields.get("top_k", 0),
            top_p=float(fields.get("top_p", 1)),
            seed=fields.get("seed", secrets.randbits(63)) % (1 << 63),
            stop_ids=() if fields.get("ignore_eos") else self._text.stop_ids,
        )


def make_app(front: Front, text: ModelText, options: HttpOptions) -> Starlette:
    """Return the application; ``HttpServer`` serves it."""
    api = _Api(front, text, options)
    routes = [
        Route("/v1/completions", partial(api.answer, is_chat=False), methods=["POST"]),
        Route(
            "/v1/chat/completions", partial(api.answer, is_chat=True), methods=["POST"]
        ),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.models),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    kinds = (HTTPException, UsageError, RejectedError, RecursionError, ClientDisconnect)
    handlers = dict.fromkeys((*kinds, Exception), _on_error)
    return Starlette(routes=routes, exception_handlers=handlers)


class _Connection(H11Protocol):
    """A connection that ends if its client is slow, and cancels its request then."""

    def __init__(self, options: HttpOptions, **others: Any) -> None:
        super().__init__(**others)
        self._options = options
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore
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
        self._timer = seconds and self.loop.call_later(seconds, self.transport.abort)


class HttpServer(uvicorn.Server):
    """Serves an application: ``serve(sockets=[bound])``, until ``should_exit``.

    It answers the requests in progress first, unless ``force_exit``.
    """

    def __init__(self, app: Starlette, options: HttpOptions) -> None:
        kind = cast("type[asyncio.Protocol]", partial(_Connection, options))
        super().__init__(
            uvicorn.Config(
                app, http=kind, ws="none", lifespan="off", interface="asgi3",
                log_config=None, log_level="error", access_log=False,
                proxy_headers=False, server_header=False,
                limit_concurrency=4096, timeout_keep_alive=30,
            )
        )  # fmt: skip

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield


def _require_valid(fields: dict[str, Any], known: dict[str, tuple[type, ...]]) -> None:
    """Raise ``UsageError``, with the field, for values of no use."""
    for name, value in fields.items():
        if name not in known:
            text = f"{shorten(name)} must not be given. Known are {', '.join(known)}."
            raise UsageError(text)
        rule, is_kept = " or ".join(_TYPES[kind] for kind in known[name]), True
        if (limits := _LIMITS.get(name)) and not isinstance(value, bool):
            rule = f"{rule} from {limits[0]} to {limits[1]}"
            is_kept = not isinstance(value, str) and limits[0] <= value <= limits[1]
        if type(value) not in known[name] or not is_kept:
            raise UsageError(f"{name} must be {rule}, got {shorten(value)}.")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} must be text without lone surrogates.") from None
    stops, options = fields.get("stop", []), fields.get("stream_options", {})
    stops: list[Any] = [stops] if isinstance(stops, str) else stops
    if len(stops) > 16 or not all(
        isinstance(s, str) and 0 < len(s) <= 1000 for s in stops
    ):
        rule = "up to 16 texts of 1 to 1000 characters"
        raise UsageError(f"stop must be {rule}, got {shorten(stops)}.")
    if options not in ({}, {"include_usage": True}, {"include_usage": False}):
        rule = "an object with include_usage, true or false"
        raise UsageError(f"stream_options must be {rule}, got {shorten(options)}.")
    fields["stop"] = stops


def _message(number: int, given: Any) -> dict[str, str]:  # noqa: ANN401  of JSON
    """Return a message of a chat; parts of its text become lines."""
    found: dict[str, Any] = {}
    if isinstance(given, dict):
        items = cast("dict[str, Any]", given).items()
        found = {name: value for name, value in items if value is not None}
    parts: Any = found.get("content")
    if isinstance(parts, list) and all(
        isinstance(p, dict) and p.keys() == {"type", "text"} and p["type"] == "text"
        for p in parts
    ):
        found["content"] = "\n".join(f"{part['text']}" for part in parts)
    if (
        found.keys() - {"name"} != {"role", "content"}
        or not all(isinstance(value, str) for value in found.values())
        or found["role"] not in _ROLES
    ):
        rule = f"an object with role ({', '.join(_ROLES)}) and content, a text"
        raise UsageError(f"messages[{number}] must be {rule}, got {shorten(given)}.")
    return found


def _limit_s(request: Request) -> float | None:
    given = request.headers.get("x-request-timeout")
    with suppress(ValueError):
        if given is None or 0 < float(given) < 1e9:
            return given and float(given)
    raise UsageError(f"x-request-timeout must be seconds, got {shorten(given)}.")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _event(value: object) -> bytes:
    return b"data: " + _json(value) + b"\n\n"


def _response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(_json(value), status, headers, "application/json")


def _describe(error: Exception) -> tuple[int, dict[str, object]]:
    """Return the status of an error, and its description in OpenAI's form."""
    status, code, text = 500, None, "an internal error; the server's log has its cause."
    match error:
        case HTTPException():
            status, text = error.status_code, error.detail
        case RejectedError():
            status, code, text = error.status, error.reason, f"{error}"
        case UsageError():
            status, text = 400, f"{error}"
        case RecursionError():
            status, text = 400, "body must be less deeply nested."
        case ClientDisconnect():
            status = 499
        case _:
            pass
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(status, code)
    param = text.partition(" must ")[0] if status in (400, 404) else None
    error_ = {"message": text, "type": kind, "param": param, "code": code}
    return status, {"error": error_}


async def _on_error(_request: Request, error: Exception) -> Response:
    status, body = _describe(error)
    headers = getattr(error, "headers", None)
    if (after_s := getattr(error, "retry_after_s", None)) is not None:
        headers = {"retry-after": f"{after_s}"}
    return _response(body, status, headers)
