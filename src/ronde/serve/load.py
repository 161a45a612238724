"""Open-loop load on an HTTP server with OpenAI's completions.

Arrival times are drawn before the first request, so a slow server does not slow the
arrivals down. Latencies count from these times, not from the moment when a late client
sent the request, which would hide the wait (coordinated omission).
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import monotonic, process_time
from typing import NamedTuple
from urllib.parse import urlsplit

from ronde.errors import UsageError

_HEARTBEAT_S = 0.01
_PROBE_S = 60.0
_WORDS = ["the", "of", "and", "to", "in", "is", "was", "for", "on", "as", "with", "by"]
_USAGE: dict[str, object] = {"stream_options": {"include_usage": True}}
_FULL = _USAGE | {"ignore_eos": True, "return_token_ids": True}
# Whether prompts are text, and further fields: the first form that a server knows.
_FORMS = ((False, _FULL), (True, _FULL), (True, _USAGE))
TEXT_FORM = 1
# Of connections, and of answers that are not HTTP or not of completions.
_FAILURES = (
    *(OSError, EOFError, asyncio.LimitOverrunError),
    *(ValueError, LookupError, AttributeError, TypeError),
)
Lengths = Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Read ``128``, ``64-256`` or ``exp:128``, as the value of an option."""
    number = "([1-9][0-9]{0,6})"
    match = re.fullmatch(f"{number}(?:-{number})?|exp:{number}", text)
    low, high, mean = (int(each or 0) for each in match.groups()) if match else (0,) * 3
    if mean:
        return lambda chance: max(1, round(chance.expovariate(1 / mean)))
    if 1 <= low <= (high or low):
        return lambda chance: chance.randint(low, high or low)
    raise UsageError(
        f"must be a number of tokens, got {text!r}. Write it as 128, 64-256 (each as "
        "likely) or exp:128 (exponential with this mean)."
    )


@dataclass(slots=True)
class LoadRequest:
    """A request that is sent at a fixed time, and its answer as it comes."""

    prompt: Sequence[int]
    max_tokens: int
    due_s: float = 0.0  # since the start; while it runs, of the clock
    times_s: list[float] = field(default_factory=list[float])  # of events with tokens
    counts: list[int] = field(default_factory=list[int])  # tokens of each
    token_ids: list[int] = field(default_factory=list[int])
    usage: dict[str, int] = field(default_factory=dict[str, int])  # the server's count
    is_done: bool = False
    error: str = ""  # its kind, a colon, and details

    @property
    def num_made(self) -> int:
        return self.usage.get("completion_tokens", sum(self.counts))

    def on_line(self, line: bytes) -> None:
        """Handle a line of the stream; each event of completions is one line."""
        now_s, data = monotonic(), line[5:].strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            self.is_done |= data == b"[DONE]"
            return
        event = json.loads(data)
        if problem := event.get("error"):
            self.error = f"error event: {problem}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            ids: list[int] = choice.get("token_ids") or []
            count, is_last = (
                len(ids) or int(bool(choice.get("text"))),
                choice.get("finish_reason"),
            )
            if count or (is_last and not self.times_s):  # a token may have no text
                self.times_s.append(now_s)
                self.counts.append(count)
                self.token_ids += ids
            self.is_done |= bool(is_last)

    def gaps_s(self) -> list[float]:
        """Return the time before each token but those of the first event.

        The gap before several tokens that come at once is divided among them.
        """
        pairs = zip(self.times_s, self.times_s[1:], self.counts[1:], strict=False)
        return [(b - a) / num for a, b, num in pairs for _ in range(num)]


class Workload(NamedTuple):
    """Distributions of a run's requests."""

    num_requests: int
    prompt: Lengths
    output: Lengths
    rate: float = 0.0  # arrivals a second, of a Poisson process; 0: all at once
    num_shared: int = 0  # tokens at the begin of all prompts, besides their own
    seed: int = 0

    def draw(self, vocabulary: int) -> list[LoadRequest]:
        """Draw the requests; the same seed gives the same prompts at any rate."""
        chance = random.Random(self.seed)  # noqa: S311 - no secret
        arrivals = random.Random(f"arrivals {self.seed}")  # noqa: S311
        words, due_s, drawn = range(vocabulary), 0.0, list[LoadRequest]()
        shared = chance.choices(words, k=self.num_shared)
        for _ in range(self.num_requests):
            due_s += arrivals.expovariate(self.rate) if self.rate else 0.0
            prompt = shared + chance.choices(words, k=self.prompt(chance))
            drawn.append(LoadRequest(prompt, self.output(chance), due_s))
        return drawn


class CompletionServer(NamedTuple):
    """A server; ``find_server`` finds the model and the form of requests."""

    url: str
    key: str = ""  # sent as a bearer token
    model: str = ""
    max_len: int = 0  # tokens of a prompt and its answer; 0 if unknown
    form: int = 0

    def body_of(self, request: LoadRequest) -> bytes:
        is_text, more = _FORMS[self.form]
        words = " ".join(_WORDS[each % len(_WORDS)] for each in request.prompt)
        fields = {"model": self.model, "prompt": words if is_text else request.prompt}
        fields |= {"max_tokens": request.max_tokens, "temperature": 0, "stream": True}
        return json.dumps(fields | more).encode()

    async def complete(self, body: bytes, request: LoadRequest, limit_s: float) -> None:
        problem = await self.send("completions", body, request.on_line, limit_s)
        if not (request.error or (request.is_done and request.times_s)):
            request.error = problem or "cut: the answer has no end, or no tokens"

    async def send(
        self, name: str, body: bytes, on_line: Callable[[bytes], None], limit_s: float
    ) -> str:
        """Send a request on a connection of its own, and handle the answer's lines.

        Returns an error as of ``LoadRequest``, or "".
        """
        url, key = urlsplit(self.url), f"Authorization: Bearer {self.key}\r\n"
        tls, writer = url.scheme == "https", None
        try:
            async with asyncio.timeout(limit_s):
                port = url.port or (443 if tls else 80)
                reader, writer = await asyncio.open_connection(
                    url.hostname, port, ssl=tls or None
                )
                writer.write(
                    f"{'POST' if body else 'GET'} {url.path}/v1/{name} HTTP/1.1\r\n"
                    f"Host: {url.netloc}\r\n{key * bool(self.key)}Connection: close\r\n"
                    f"Content-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                return await _handle_answer(reader, on_line)
        except _FAILURES as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if writer:
                writer.transport.abort()


async def _handle_answer(
    reader: asyncio.StreamReader, on_line: Callable[[bytes], None]
) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status, rest = int(head.split()[1]), b""
    async for piece in _read_body(reader, head):
        *lines, rest = (rest + piece).split(b"\n") if status == 200 else (rest + piece,)
        for line in lines:
            on_line(line)
    if status != 200:
        return f"HTTP {status}: {rest.decode(errors='replace')}"
    on_line(rest)
    return ""


async def _read_body(reader: asyncio.StreamReader, head: str) -> AsyncIterator[bytes]:
    if re.search(r"\r\ntransfer-encoding:.*chunked", head):
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif match := re.search(r"\r\ncontent-length: *([0-9]+)", head):
        yield await reader.readexactly(int(match[1]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def find_server(server: CompletionServer) -> CompletionServer:
    """Return the server with its model and a form of requests that it knows.

    Raises:
        UsageError: It cannot be used as asked.
    """
    lines: list[bytes] = []
    name = "models"
    problem = await server.send(name, b"", lines.append, _PROBE_S)
    try:
        entry = json.loads(b"\n".join(lines))["data"][0]
        model, max_len = server.model or entry["id"], entry.get("max_model_len") or 0
    except (ValueError, LookupError, TypeError):
        problem = problem or f"{lines}"
    else:
        name = "completions"
        for form in range(server.form, len(_FORMS)):
            server = server._replace(model=model, max_len=max_len, form=form)
            probe = LoadRequest((1,), 1)
            await server.complete(server.body_of(probe), probe, _PROBE_S)
            problem = probe.error
            if not problem:
                return server
            if not problem.startswith(("HTTP 400", "HTTP 422")):
                break
    raise UsageError(
        f"{server.url}/v1/{name} must answer, got {problem[:300]}. Check the URL, "
        "--model and --api-key-file."
    )


class LoadOutcome(NamedTuple):
    """The answers of a run, and the client's own part in their times."""

    requests: Sequence[LoadRequest]
    span_s: float  # from the start to the last token
    late_s: Sequence[float]  # delays of the client: of each arrival and of a timer
    client_cpu: float  # of a core

    def figures(self) -> dict[str, float]:
        """Return rates and percentiles, of whole answers only.

        A percentile is linear between the two nearest of the sorted values, as numpy's.
        """
        whole = [each for each in self.requests if not each.error]
        num_made = sum(each.num_made for each in whole)
        found = {"tokens_per_s": num_made, "requests_per_s": len(whole)}
        found = {name: count / self.span_s for name, count in found.items()}
        times_s = {
            "ttft": [each.times_s[0] - each.due_s for each in whole],
            "itl": [gap_s for each in whole for gap_s in each.gaps_s()],
            "e2e": [each.times_s[-1] - each.due_s for each in whole],
            "client_late": list(self.late_s),
        }
        for name, values in times_s.items():
            least = values * 2 if len(values) == 1 else values  # it needs two
            cuts = quantiles(least, n=100, method="inclusive") if values else ()
            for percent in (50, 95, 99) if values else ():
                found[f"{name}_p{percent}_ms"] = 1e3 * cuts[percent - 1]
        return found | {"client_cpu": self.client_cpu}


def median_figures(outcomes: Sequence[LoadOutcome]) -> dict[str, float]:
    """Return the median over the runs of each figure that all of them have."""
    runs = [each.figures() for each in outcomes]
    names = [name for name in runs[0] if all(name in each for each in runs)]
    return {name: median(each[name] for each in runs) for name in names}


async def run_load(
    server: CompletionServer, requests: Sequence[LoadRequest], limit_s: float
) -> LoadOutcome:
    """Send each request at its time, however many are unanswered.

    Args:
        server: As ``find_server`` returned it.
        requests: Get their answers here.
        limit_s: The longest time for one answer.
    """
    late_s: list[float] = []
    bodies = [server.body_of(each) for each in requests]
    start_s, start_cpu_s = monotonic() + _HEARTBEAT_S, process_time()

    async def wait_until(due_s: float) -> None:
        await asyncio.sleep(due_s - monotonic())
        late_s.append(monotonic() - due_s)

    async def ask(request: LoadRequest, body: bytes) -> None:
        request.due_s += start_s
        await wait_until(request.due_s)
        await server.complete(body, request, limit_s)

    async def beat() -> None:
        while True:
            await wait_until(monotonic() + _HEARTBEAT_S)

    heart = asyncio.create_task(beat())
    await asyncio.gather(*map(ask, requests, bodies))
    heart.cancel()
    ends_s = [each.times_s[-1] for each in requests if each.times_s] or [monotonic()]
    cpu = (process_time() - start_cpu_s) / (monotonic() - start_s)
    return LoadOutcome(requests, max(ends_s) - start_s, late_s, cpu)
