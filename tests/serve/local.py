"""A server in this process: a front, its HTTP, and a replica that is a thread."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from itertools import product
from string import ascii_lowercase

import torch
from tests.limits import HANG_S
from tests.serve.model import logits_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ronde.serve import (
    ApiServer,
    BatchManager,
    Capacity,
    Front,
    FrontLink,
    FrontOptions,
    HttpOptions,
    ModelText,
    ReplicaConfig,
    ReplicaOptions,
    ReplicaRanks,
    ServingMetrics,
    StepEngine,
    make_app,
)

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}\n"
    "{% if each.role == 'developer' %}{{ raise_exception('not them') }}{% endif %}\n"
    "<|{{ each.role }}|>{{ each.content }}\n"
    "{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RANDOM = "?"  # a prompt that begins with it gets random tokens; others are repeated


def make_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(ascii_lowercase, repeat=2))
    words = [*SPECIAL, *letters, *("".join(pair) for pair in pairs)]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(numbers, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_model(folder, template=TEMPLATE):
    """Write the files of a model that its text needs."""
    make_tokenizer().save(f"{folder / 'tokenizer.json'}")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


NUM_WORDS = make_tokenizer().get_vocab_size()
CAPACITY = Capacity(
    num_blocks=400, block_tokens=16, max_requests=32, max_len=2100, vocabulary=NUM_WORDS
)


class EchoEngine(StepEngine):
    """Repeats the prompt, over and over, while its gate is open.

    A prompt that begins with ``RANDOM`` gets tokens by seed and temperature.
    """

    def __init__(self, tokenizer):
        super().__init__(self._compute, self._compute, CAPACITY)
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self._random = tokenizer.token_to_id(RANDOM)

    def step(self):
        assert self.gate.wait(HANG_S)
        self.num_steps += 1
        return super().step()

    def _compute(self, rows):
        logits = torch.full((len(rows), NUM_WORDS), -50.0)
        for row, scores in zip(rows, logits, strict=True):
            num_made = row.request.num_made + len(row.tokens)
            prompt = row.request.prompt[
                : len(row.request.prompt) - row.request.num_made
            ]
            if prompt[0] == self._random:
                table = logits_of([*prompt, num_made]).float()
                scores[10 : 10 + len(table)] = table
            else:
                scores[prompt[num_made % len(prompt)]] = 50.0
        return logits


class ThreadReplica(ReplicaRanks):
    """A replica of one rank that is a thread of this process."""

    engine: EchoEngine

    async def _run_job(self):
        self._has_served = False
        await asyncio.to_thread(self._serve)
        return 0

    def _serve(self):
        link = FrontLink(self._config.socket, 0, "")
        manager = BatchManager(
            self.engine,
            link.get_requests,
            link.send_response,
            link.poll_stop,
            link.send_stats,
        )
        link.attach(CAPACITY, manager.stop, lambda: None)
        try:
            manager.run()
        finally:
            link._socket.close()


class LocalServer:
    """Runs a server in a thread; other threads call it over HTTP."""

    def __init__(self, folder, options, front_options):
        self.text = ModelText(f"{folder}")
        self.engine = EchoEngine(make_tokenizer())
        self.front = Front(
            ReplicaConfig(f"{folder}"),
            front_options,
            [],
            ServingMetrics("vllm:", options.model),
            print,
        )
        replica = ThreadReplica(
            *(0, ReplicaConfig(f"{folder}"), ReplicaOptions(1, hang_timeout_s=HANG_S)),
            *(self.front, print),
        )
        replica.engine = self.engine
        self.front._flights[replica] = {}
        self.http = ApiServer(make_app(self.front, self.text, options), options)
        self.is_served = threading.Event()
        bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # soon full
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(bound)))

    async def _run(self, bound):
        self.loop = asyncio.get_running_loop()
        ranks = asyncio.create_task(self.front.run())
        while not self.front.health().is_ready:
            await asyncio.sleep(0.01)
        self.is_served.set()
        await self.http.serve(sockets=[bound])
        await self.front.drain(HANG_S)
        await ranks

    def start(self):
        self._thread.start()
        assert self.is_served.wait(HANG_S)

    def stop(self):
        self.engine.gate.set()
        self.http.should_exit = True
        self._thread.join(HANG_S)
        assert not self._thread.is_alive()

    def ask(self, function, *args):
        """Call a function in the server's thread; return its result."""

        async def call():
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(HANG_S)

    def num_held(self):
        """Return the requests that run or wait, and the connections."""

        def held():
            health = self.front.health()
            connections = self.http.server_state.connections
            return health.num_running, health.num_waiting, len(connections)

        return self.ask(held)


@contextmanager
def served(folder, front_options=FrontOptions(), **options):  # noqa: B008
    write_model(folder)
    options = HttpOptions(**({"model": "toy"} | options))
    server = LocalServer(folder, options, front_options)
    server.start()
    try:
        yield server
    finally:
        server.stop()
