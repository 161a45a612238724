"""Serve many clients at once, slow ones and ones that hang up; count what is left.

The server runs in this process, on a toy engine; the clients in others. ``--clients``
call at once, half of them for streams, and each must get the text that it must get.
``--slow`` clients do not read, while others are served. In each of ``--rounds`` rounds
``--vanishing`` clients hang up at a random byte. After each part no request and no
connection may be left, and at the end all clients call once more: descriptors, threads
and memory must be those after the first time, but for ``--allow`` MiB. The last line is
JSON. Exits with 1 if anything was wrong.

    python -m tests.soak.serve_clients
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.limits import HANG_S, until
from tests.serve.local import LocalServer, make_tokenizer, served
from tests.soak.figures import reset_signals
from tests.soak.memory import held

WORDS = ("all ranks", "take", "every", "step alike", "and clients", "get", "🙂", "ü")
WRITE_S = 3.0


def main() -> int:
    """Run all parts and print the table; return the exit code."""
    reset_signals()
    parser = argparse.ArgumentParser(description="Serve many clients at once.")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--vanishing", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allow", type=float, default=8.0, help="MiB of growth")
    parser.add_argument("--as-clients", nargs=2, metavar=("PORT", "KIND"))
    options = parser.parse_args()
    if options.as_clients:
        port, kind = options.as_clients
        print(json.dumps(KINDS[kind](int(port), options.clients, options.seed)))
        return 0
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), write_s=WRITE_S) as server,
    ):
        wrong, figures = Parts(server, options).run()
    for text in wrong[:20]:
        print(f"wrong: {text}")
    print(json.dumps({"benchmark": "serve_clients", "wrong": len(wrong), **figures}))
    return bool(wrong)


class Parts:
    """The parts of the run, over one server."""

    def __init__(self, server: LocalServer, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.wrong: list[str] = []
        self.figures: dict[str, object] = {}

    def run(self) -> tuple[list[str], dict[str, object]]:
        options = self.options
        self._ask("warm-up", 50)
        self._settle("warm-up")
        before = held(0)
        self._ask("first", options.clients)
        self._settle("first")
        first = held(1)
        slow = self._start("slow", options.slow)
        until(lambda: self.server.num_held()[2] >= options.slow)
        self._ask("beside slow", 100)
        self._settle("slow")
        slow.communicate(timeout=HANG_S)  # it ends with its stdin
        for number in range(options.rounds):
            self._start("hang_up", options.vanishing, number).communicate(
                timeout=HANG_S
            )
            self._settle(f"round {number}")
        self._ask("last", options.clients)
        self._settle("last")
        last = held(2)
        for name in ("num_threads", "num_descriptors"):
            if getattr(last, name) > getattr(first, name):
                self.wrong.append(f"{name} grew: {first}, {last}")
        if last.memory_mib > first.memory_mib + options.allow:
            self.wrong.append(f"memory grew: {first}, {last}")
        for name, each in (("before", before), ("first", first), ("last", last)):
            figures = (each.memory_mib, each.num_threads, each.num_descriptors)
            self.figures[name] = figures
            print(
                f"{name:8} {figures[0]:8} MiB, {figures[1]} threads, {figures[2]} fds"
            )
        return self.wrong, self.figures

    def _ask(self, name: str, num: int) -> None:
        begun_s = time.monotonic()
        output, _ = self._start("ask", num).communicate(timeout=5 * HANG_S)
        found = json.loads(output)
        self.wrong += [f"{name}: {text}" for text in found["wrong"]]
        seconds = time.monotonic() - begun_s
        self.figures[f"{name}_right"] = found["right"]
        print(f"{name:12} {found['right']} of {num} right in {seconds:.1f} s")

    def _start(self, kind: str, num: int, number: int = 0) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.soak.serve_clients"),
                *("--as-clients", str(self.server.port), kind, "--clients", str(num)),
                *("--seed", str(self.options.seed + number)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _settle(self, name: str) -> None:
        """Wait until no request and no connection is left."""
        until(lambda: self.server.num_held() == (0, 0, 0), self.server.num_held)
        health = self.server.ask(self.server.front.health)
        if health.kv_usage:
            self.wrong.append(f"{name}: {health}")


def make_request(dice: random.Random, max_tokens: int, *, stream: bool) -> bytes:
    body = {
        "prompt": " ".join(dice.choices(WORDS, k=dice.randint(1, 12))),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def ask(port: int, num: int, seed: int) -> dict[str, object]:
    """Call all at once; compare each text with the prompt, over and over."""
    tokenizer, wrong = make_tokenizer(), list[str]()
    dice = random.Random(seed)

    async def call(number: int) -> None:
        max_tokens, is_stream = dice.randint(1, 60), number % 2 == 0
        request = make_request(dice, max_tokens, stream=is_stream)
        prompt = json.loads(request.partition(b"\r\n\r\n")[2])["prompt"]
        ids = tokenizer.encode(prompt).ids
        wanted = tokenizer.decode((ids * max_tokens)[:max_tokens])
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            if is_stream:
                lines = [line for line in body.split(b"\n") if b"data: {" in line]
                chunks = [json.loads(line[line.index(b"{") :]) for line in lines]
                text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
                is_whole = body.count(b"data: [DONE]") == 1
            else:
                text, is_whole = json.loads(body)["choices"][0]["text"], True
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"client {number}: {error!r}")
            return
        if not (is_whole and text == wanted and b" 200 " in head):
            wrong.append(f"client {number}: {text!r} and not {wanted!r}")

    async def call_all() -> None:
        await asyncio.gather(*(call(number) for number in range(num)))

    asyncio.run(call_all())
    return {"right": num - len(wrong), "wrong": wrong}


def be_slow(port: int, num: int, seed: int) -> dict[str, object]:
    """Call for long streams and read nothing, until stdin ends."""
    dice, socks = random.Random(seed), list[socket.socket]()
    for _ in range(num):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(make_request(dice, 1000, stream=True))
        socks.append(sock)
    sys.stdin.read()
    return {"right": num}


def hang_up(port: int, num: int, seed: int) -> dict[str, object]:
    """Call, read some bytes and hang up."""
    dice = random.Random(seed)

    async def call() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(make_request(dice, 1000, stream=dice.random() < 0.7))
        for _ in range(dice.choice((0, 0, 1, 3, 9))):
            await reader.read(512)
        writer.transport.abort()

    async def call_all() -> None:
        await asyncio.gather(*(call() for _ in range(num)))

    asyncio.run(call_all())
    return {"right": num}


KINDS: dict[str, Callable[[int, int, int], dict[str, object]]] = {
    "ask": ask,
    "slow": be_slow,
    "hang_up": hang_up,
}

if __name__ == "__main__":
    sys.exit(main())
