"""``ronde bench serve``: load on a server, which it may start itself."""

import argparse
import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import copyfileobj
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from ronde.arguments import CommandParser, whole_number
from ronde.bench.options import Exit
from ronde.cli.help import BENCH_SERVE_HELP
from ronde.errors import UsageError
from ronde.launch.bootstrap import raise_open_files_limit
from ronde.processes import end_with
from ronde.records import Record, append_record
from ronde.render.serve import draw_load
from ronde.serve import (
    TEXT_FORM,
    CompletionServer,
    LoadOutcome,
    LoadRequest,
    Workload,
    find_server,
    median_figures,
    parse_lengths,
    run_load,
)
from ronde.units import parse_positive_s

_POLICIES = ("guaranteed_no_evict", "static_batch")


def _parse_rate(text: str) -> float:
    if not re.fullmatch(r"max|[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise UsageError(f"must be arrivals a second, or max, got {text!r}")
    return 0.0 if text == "max" else float(text)


_NUMBER, _SOME = whole_number(), whole_number(1)
_TYPES = {"N": _NUMBER, "--requests": _SOME, "--rounds": _SOME, "--vocabulary": _SOME}
_TYPES |= {"RATE": _parse_rate, "LENGTH": parse_lengths, "TIME": parse_positive_s}


def run_serve(words: Sequence[str]) -> int:
    end = words.index("--") if "--" in words else len(words)
    parser = CommandParser(
        "ronde bench serve", BENCH_SERVE_HELP, types=_TYPES, positionals={"server": "?"}
    )
    given = parser.read(words[:end])
    if given is None:
        return Exit.OK
    if not given.server:
        parser.error("a URL or MODEL is required")
    own_words = words[end + 1 :]
    vocabulary, max_len = _limits_of(given, own_words)
    workload = Workload(
        given.requests or 100,
        given.prompt_len or parse_lengths("32-128"),
        given.output_len or parse_lengths("64"),
        given.rate or 0.0,
        given.share_prefix or 0,
        given.seed or 0,
    )
    _require_room(workload.draw(vocabulary), max_len)
    raise_open_files_limit(workload.num_requests + 64)
    with ExitStack() as stack:
        servers = _find_servers(given, own_words, stack)
        runs = _measure(given, workload, vocabulary, servers)
    print(f"# ronde bench serve {' '.join(words)}\n{draw_load(runs)}", end="")
    if given.json:
        figures = {name: median_figures(each) for name, each in runs.items()}
        values = {"words": [*words], "servers": figures}
        append_record(Path(given.json), Record("bench_serve", values))
    folder = given.check or given.server
    is_failed = given.check is not None and _check(folder, runs)
    answers = [each for run in runs.values() for one in run for each in one.requests]
    return Exit.FAILED if is_failed or all(each.error for each in answers) else Exit.OK


def _limits_of(given: argparse.Namespace, own_words: Sequence[str]) -> tuple[int, int]:
    """Return the vocabulary of prompts, and the model's length or 0 if unknown."""
    server = given.server
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise UsageError(f"--json must be a file in a directory, got {given.json}.")
    if "://" not in server:
        try:
            config = json.loads(Path(server, "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"server must be a URL such as http://127.0.0.1:8000, or the folder of "
                f"a model with its config.json, got {server!r}: {error}."
            ) from None
        vocabulary = given.vocabulary or config.get("vocab_size", 256)
        return vocabulary, config.get("max_position_embeddings", 0)
    try:
        url = urlsplit(server)
        is_valid = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(
            f"URL must be as http://HOST:PORT, got {server!r}. Correct it."
        )
    if given.static or own_words or given.check == "":
        raise UsageError(
            f"--static, options after -- and --check without a folder must be used "
            f"with a MODEL, got the URL {server}. Give the model's folder."
        )
    return given.vocabulary or 256, 0


def _require_room(requests: Sequence[LoadRequest], max_len: int) -> None:
    longest = max(requests, key=lambda each: len(each.prompt) + each.max_tokens)
    num_prompt, num_made = len(longest.prompt), longest.max_tokens
    if max_len and num_prompt + num_made > max_len:
        raise UsageError(
            f"prompt + answer must be at most the model's {max_len} tokens: got "
            f"{num_prompt} + {num_made} = {num_prompt + num_made}. Give smaller "
            "--prompt-len, --output-len or --share-prefix."
        )


def _find_servers(
    given: argparse.Namespace, own_words: Sequence[str], stack: ExitStack
) -> dict[str, CompletionServer]:
    key, servers = "", dict[str, CompletionServer]()
    if given.api_key_file:
        try:
            key = Path(given.api_key_file).read_text(encoding="utf-8").split()[0]
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(f"--api-key-file must hold a key, got {error}.") from None
    for policy in _POLICIES if given.static else ("",):
        url = given.server
        if "://" not in url:
            more = [] if given.check is None else ["--dtype", "float64"]
            more += [*own_words, *(["--policy", policy] if policy else [])]
            url = stack.enter_context(_served([url, *more]))
        form = TEXT_FORM if given.text else 0
        server = CompletionServer(url.rstrip("/").removesuffix("/v1"), key, form=form)
        found = asyncio.run(find_server(server._replace(model=given.model or "")))
        if given.check is not None and found.form >= TEXT_FORM:
            raise UsageError(f"--check needs token ids, but {url} serves text only.")
        servers[policy or found.model] = found
    return servers


@contextmanager
def _served(words: Sequence[str]) -> Generator[str]:
    """Serve a model in a ``with`` block; yield the URL."""
    command = [sys.executable, "-m", "ronde", "serve", *words, "--port", "0"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    ) as process:
        lines, url = process.stderr or (), None
        try:
            for line in lines:
                sys.stderr.write(line)
                if url := re.search(r"ronde: serving .* at (http://\S+)", line):
                    break
            if url is None:
                raise UsageError("ronde serve has not started: see above.")
            Thread(target=copyfileobj, args=(lines, sys.stderr), daemon=True).start()
            yield url[1]
        finally:
            process.terminate()


def _measure(
    given: argparse.Namespace,
    workload: Workload,
    vocabulary: int,
    servers: dict[str, CompletionServer],
) -> dict[str, list[LoadOutcome]]:
    """Load the servers in turn, in each round with the same requests."""
    runs: dict[str, list[LoadOutcome]] = {name: [] for name in servers}
    limit_s = given.timeout or 600.0

    def load(server: CompletionServer, each: Workload) -> LoadOutcome:
        requests = each.draw(vocabulary)
        _require_room(requests, server.max_len)
        gc.freeze()  # no pauses to look through them
        return asyncio.run(run_load(server, requests, limit_s))

    for server in servers.values() if given.warmup else ():
        load(server, workload._replace(num_requests=given.warmup, rate=0.0, seed=-1))
    for number in range(given.rounds or 1):
        for name in list(servers)[:: -1 if number % 2 else 1]:
            seeded = workload._replace(seed=workload.seed + number)
            runs[name].append(load(servers[name], seeded))
    return runs


def _check(folder: str, runs: dict[str, list[LoadOutcome]]) -> bool:
    """Compare all answers with those of ``generate``; return True if any differ."""
    differences, num_requests = list[str](), 0
    for name, outcomes in runs.items():
        requests = [each for outcome in outcomes for each in outcome.requests]
        found = zip(requests, _generate(folder, requests), strict=True)
        num_requests += len(requests)
        for number, (request, right) in enumerate(found):
            made = request.token_ids
            if made != right:
                pairs = zip([*made, None], [*right, None], strict=False)
                at = next(i for i, (a, b) in enumerate(pairs) if a != b)
                differences.append(
                    f"first request {number} of {name}, token {at} of {len(right)}: "
                    f"{made[at : at + 1]}, generate has {right[at : at + 1]}"
                    f"{request.error and ' after ' + request.error}"
                )
    text = f"# {len(differences)} of {num_requests} answers differ from generate"
    print(": ".join([text, *differences[:1]]))
    return bool(differences)


def _generate(folder: str, requests: Sequence[LoadRequest]) -> Iterator[list[int]]:
    import torch
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    # Without the end of text, as the requests ignore it.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    for each in requests:
        prompt = torch.tensor([each.prompt])
        made = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=each.max_tokens,
        )
        yield made[0, len(each.prompt) :].tolist()
