"""``ronde serve``: a model on several ranks, over HTTP with OpenAI's API."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ronde.arguments import CommandParser, whole_number
from ronde.cli.exits import EXIT_INTERRUPTED
from ronde.errors import UsageError
from ronde.launch.environments import own_environment
from ronde.topology.machine import read_gpus
from ronde.units import counted, format_duration, parse_duration_s, parse_positive_s
from ronde.world.environment import select_variables

if TYPE_CHECKING:
    from ronde.serve.front import Front
    from ronde.serve.http import ApiServer
    from ronde.serve.protocol import ReplicaConfig
    from ronde.serve.supervision import ReplicaOptions

_HELP = """\
usage: ronde serve MODEL [-n N] [options]

Serve a model on several ranks over HTTP, with OpenAI's API. MODEL is a folder as
transformers saves it. Requests join and leave the running batch at every step; if a
rank is lost, the ranks start again and each request goes on from its last token.

options:
  -h, --help            show this help and exit

ranks:
  -n, --num-proc N      number of ranks (default: one per GPU, else 1)
  --tp N                ranks that share one copy of the model; with 2 of -n 4, two
                        copies answer (default: all)
  -H, --hosts HOSTS     hosts and their slots, as a:4,b:4; this one is the first
  --engine NAME         transformers, vllm, or MODULE:FACTORY (default: transformers)
  --dtype {float64,float32,bfloat16,float16}
                        type of the weights (default: the model's own)

server:
  --host ADDRESS        address to listen at (default: 127.0.0.1)
  --port PORT           port to listen at; 0 for a free one (default: 8000)
  --api-key-file FILE   file of accepted keys, one a line; RONDE_API_KEY holds one
  --no-api-key          listen at other addresses than 127.0.0.1 without a key
  --served-model-name NAME
                        name in requests (default: the folder's)
  --chat-template FILE  template of chats (default: the model's)
  --metrics-prefix PREFIX
                        prefix of names at /metrics, such as vllm: (default: ronde_)

requests:
  --policy {guaranteed_no_evict,max_utilization,static_batch}
                        when a waiting request starts: once its tokens surely fit,
                        once its next one fits, or once nothing runs (default:
                        guaranteed_no_evict)
  --max-requests N      requests that run at a time (default: 64)
  --max-queue N         requests that wait; further ones get 429 (default: 1024)
  --max-batch-tokens N  tokens of a step; longer prompts take several (default: 2048,
                        on CPUs 128)
  --max-model-len N     tokens of a prompt and its answer (default: the model's)
  --kv-blocks N         blocks of the KV cache (default: by --kv-memory)
  --kv-memory SHARE     share of a rank's free memory for the KV cache (default: 0.9,
                        on CPUs 0.3)
  --request-timeout TIME
                        end requests after TIME, as 30s or 5m (default: never)

faults:
  --on-fault {resume,error}
                        when ranks are lost: go on with their requests, or answer
                        503 (default: resume)
  --hang-timeout TIME   start the ranks again after TIME without a step (default: 10s)
  --max-restarts N      end after more losses than this in ten minutes, with exit
                        code 75 (default: 5)
  --drain TIME          after SIGTERM or Ctrl-C, time for requests in progress; a
                        second signal ends them (default: 30s)
"""
_DEFAULTS = {
    "engine": "transformers",
    "host": "127.0.0.1",
    "port": 8000,
    "metrics_prefix": "ronde_",
    "policy": "guaranteed_no_evict",
    "max_requests": 64,
    "max_queue": 1024,
    "max_batch_tokens": 0,
    "max_model_len": 0,
    "kv_blocks": 0,
    "kv_memory": 0.0,
    "on_fault": "resume",
    "hang_timeout": 10.0,
    "max_restarts": 5,
    "drain": 30.0,
}
_PACKAGES = ("prometheus_client", "starlette", "tokenizers", "uvicorn")
_BACKLOG = 1024
_LAST_ANSWERS_S = 2.0  # for clients to read them, after the ranks have ended
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text)) < 1:
            return share
    raise UsageError(f"must be a number above 0 and below 1, got {text!r}")


_TYPES = {
    "N": whole_number(1),
    "--port": whole_number(0, 65535),
    "--kv-memory": _share,
    "--max-restarts": whole_number(),
    "TIME": parse_positive_s,
    "--drain": parse_duration_s,
}


def run(words: Sequence[str]) -> int:
    parser = CommandParser(
        "ronde serve", _HELP, types=_TYPES, positionals={"model": None}
    )
    parser.set_defaults(**_DEFAULTS)
    if (options := parser.read(words)) is None:
        return 0
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"ronde serve needs {', '.join(missing)}: pip install 'ronde[serve]'"
        )
    from ronde.serve.front import Front, FrontOptions
    from ronde.serve.http import ApiServer, HttpOptions, make_app
    from ronde.serve.metrics import ServingMetrics
    from ronde.serve.text import ModelText

    config, jobs = _plan(options)
    text = ModelText(options.model, options.chat_template or "")
    name = options.served_model_name or Path(config.model).name
    http = HttpOptions(name, _read_keys(options))
    metrics = ServingMetrics(options.metrics_prefix, name)
    resumes = options.on_fault == "resume"
    limits = FrontOptions(options.max_queue, options.request_timeout, resumes)

    async def serve(listener: socket.socket) -> int:
        front = Front(config, limits, jobs, metrics, _report)
        server = ApiServer(make_app(front, text, http), http)
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        title = f"{name} at http://{host}:{port}/v1"
        return await _serve(front, server, listener, title, options.drain)

    with _listen(options.host, options.port) as listener:
        _report(f"loading {name} on {counted(len(jobs) * jobs[0].num_ranks, 'rank')}")
        return asyncio.run(serve(listener))


async def _serve(
    front: "Front",
    server: "ApiServer",
    listener: socket.socket,
    title: str,
    drain_s: float,
) -> int:
    """Serve until a signal, or until the ranks have ended; return the exit code."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(number, signals.put_nowait, number)
    ranks = asyncio.create_task(front.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    events = [
        asyncio.create_task(each)
        for each in (_announce(front, title), _drain(front, signals, drain_s))
    ]
    code = EXIT_INTERRUPTED
    try:
        await asyncio.wait([ranks, events[-1]], return_when=asyncio.FIRST_COMPLETED)
        if ranks.done():
            code = ranks.result()
    finally:
        for task in (ranks, *events):
            task.cancel()
        await asyncio.gather(ranks, *events, return_exceptions=True)
        server.should_exit = True
        await asyncio.wait([serving], timeout=0 if code else _LAST_ANSWERS_S)
        server.force_exit = True  # a slow reader would hold it for a minute
        await serving
    return code


async def _announce(front: "Front", title: str) -> None:
    await front.was_ready.wait()
    _report(f"serving {title}")


async def _drain(front: "Front", signals: asyncio.Queue[int], limit_s: float) -> None:
    """Return at the second signal; at the first one, let requests end."""
    name = signal.Signals(await signals.get()).name
    health = front.health()
    num = health.num_running + health.num_waiting
    _report(
        f"{name}: {counted(num, 'request')} in progress; they have "
        f"{format_duration(limit_s)}. A second signal ends them now."
    )
    drain = asyncio.create_task(front.drain(limit_s))
    await signals.get()
    drain.cancel()


def _plan(options: argparse.Namespace) -> "tuple[ReplicaConfig, list[ReplicaOptions]]":
    """Return the configuration of all ranks, and the job of each copy of the model."""
    from ronde.serve.engines import read_model, require_engine, require_tp
    from ronde.serve.protocol import ReplicaConfig
    from ronde.serve.supervision import ReplicaOptions

    environ = own_environment()
    gpus = [each.visible_as for each in read_gpus("/", environ)]
    if options.hosts and not options.num_proc:
        raise UsageError("-n must be given with -H, got none. Type: -n 8")
    num = options.num_proc or max(1, len(gpus))
    tp = options.tp or num
    if num % tp:
        raise UsageError(f"-n must be a multiple of --tp, got -n {num} and --tp {tp}.")
    if options.hosts and num > tp:
        raise UsageError(
            f"--tp must be -n with -H, got -n {num} and --tp {tp}. Start one server "
            "for each copy of the model."
        )
    model = Path(options.model).resolve()
    require_engine(options.engine)
    facts = read_model(str(model))
    require_tp(facts, tp)
    if options.max_model_len > facts.max_len:
        raise UsageError(
            f"--max-model-len must be at most {facts.max_len}, the model's own, got "
            f"{options.max_model_len}."
        )
    fields = {*ReplicaConfig._fields} & {*_DEFAULTS}
    config = ReplicaConfig(
        model=str(model),
        dtype=options.dtype or "",
        **{name: getattr(options, name) for name in fields},
    )
    hosts = ("-H", options.hosts) if options.hosts else ("--standalone",)
    jobs: list[ReplicaOptions] = []
    for first in range(0, num, tp):
        env: dict[str, str] = {}
        if num > tp:
            env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num))
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + tp])
        jobs.append(
            ReplicaOptions(tp, hosts, env, options.hang_timeout, options.max_restarts)
        )
    return config, jobs


def _read_keys(options: argparse.Namespace) -> tuple[str, ...]:
    keys = [*select_variables(["RONDE_API_KEY"]).values()]
    if options.api_key_file:
        try:
            keys += Path(options.api_key_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file cannot be read: {error}.") from None
        if not keys:
            raise UsageError(
                f"--api-key-file must hold a key, got {options.api_key_file!r}, an "
                "empty file."
            )
    if not keys and not options.no_api_key and options.host not in _LOOPBACK:
        raise UsageError(
            f"a server at {options.host} must have a key. Give --api-key-file FILE, or "
            "--no-api-key if everyone who reaches it may use it."
        )
    return tuple(keys)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--host and --port must be a free address of this machine, got {host} and "
            f"{port}: {error.strerror}."
        ) from None


def _report(text: str) -> None:
    print(f"ronde: {text}", file=sys.stderr, flush=True)
