"""``ronde bench serve``: load on a server, which it may start itself."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import eq
from pathlib import Path
from threading import Thread
from typing import Any

from ronde import serve
from ronde.arguments import CommandParser, whole_number
from ronde.bench.options import Exit
from ronde.cli.help import BENCH_SERVE_HELP
from ronde.errors import UsageError
from ronde.launch.bootstrap import raise_open_files_limit
from ronde.processes import end_with
from ronde.records import Record, append_record
from ronde.render.serve import draw_load
from ronde.units import parse_positive_s

_POLICIES = ("guaranteed_no_evict", "static_batch")
Runs = Mapping[str, list[serve.LoadOutcome]]


def _parse_rate(text: str) -> float:
    if not re.fullmatch(r"max|[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise UsageError(f"must be arrivals a second, or max, got {text!r}")
    return 0.0 if text == "max" else float(text)


_TYPES = {"N": whole_number(), "RATE": _parse_rate, "LENGTH": serve.parse_lengths} | {
    "TIME": parse_positive_s,
    **dict.fromkeys(("--requests", "--rounds", "--vocabulary"), whole_number(1)),
}


def run_serve(words: Sequence[str]) -> int:
    end = [*words, "--"].index("--")
    positionals = {"server": "?"}
    parser = CommandParser(
        "ronde bench serve", BENCH_SERVE_HELP, types=_TYPES, positionals=positionals
    )
    parser.set_defaults(requests=100, rate=0.0, share_prefix=0, seed=0, warmup=0)
    parser.set_defaults(rounds=1, timeout=600.0, vocabulary=0, model="")
    prompt_len, output_len = map(serve.parse_lengths, ("32-128", "64"))
    parser.set_defaults(prompt_len=prompt_len, output_len=output_len)
    given = parser.read(words[:end])
    if given is None:
        return Exit.OK
    if not given.server:
        parser.error("a URL or MODEL is required")
    given.options = words[end + 1 :]
    vocabulary, max_len = _limits_of(given)
    workload = serve.Workload(
        *(given.requests, given.prompt_len, given.output_len),
        *(given.rate, given.share_prefix, given.seed),
    )
    _require_room(workload.draw(vocabulary), max_len)
    raise_open_files_limit(workload.num_requests + 64)
    with ExitStack() as stack:
        runs = _measure(given, workload, vocabulary, _find_servers(given, stack))
    print(f"# ronde bench serve {' '.join(words)}\n{draw_load(runs)}", end="")
    if given.json:
        figures = {name: serve.median_figures(each) for name, each in runs.items()}
        record = Record("bench_serve", {"words": [*words], "servers": figures})
        append_record(Path(given.json), record)
    is_wrong = given.check is not None and _check(given.check or given.server, runs)
    is_failed = not any(
        each.figures()["tokens_per_s"] for run in runs.values() for each in run
    )
    return Exit.FAILED if is_wrong or is_failed else Exit.OK


def _limits_of(given: Namespace) -> tuple[int, int]:
    """Return the vocabulary of prompts, and the model's length or 0 if unknown."""
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise UsageError(f"--json must be a file in a directory, got {given.json}.")
    if re.match("https?://[^/]", given.server):
        if given.static or given.options or given.check == "":
            raise UsageError(
                "--static, --check without a folder, and options after -- must be used "
                f"with a MODEL, got the URL {given.server}. Give the model's folder."
            )
        return given.vocabulary or 256, 0
    try:
        facts = serve.read_model(given.server)
    except UsageError as error:
        raise UsageError(
            f"server must be a URL such as http://127.0.0.1:8000, or a model: {error}"
        ) from None
    return given.vocabulary or facts.vocabulary, facts.max_len


def _require_room(requests: Sequence[serve.LoadRequest], max_len: int) -> None:
    num, most = max((len(r.prompt) + r.max_tokens, r.max_tokens) for r in requests)
    if max_len and num > max_len:
        raise UsageError(
            f"prompt + answer must be at most the model's {max_len} tokens, got "
            f"{num - most} + {most} = {num}. Lower --prompt-len or --output-len."
        )


def _find_servers(
    given: Namespace, stack: ExitStack
) -> Mapping[str, serve.CompletionServer]:
    """Return the servers by policy or model; the stack ends those that it starts."""
    key, servers = "", dict[str, serve.CompletionServer]()
    try:
        if given.api_key_file:
            key = Path(given.api_key_file).read_text(encoding="utf-8").split()[0]
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"--api-key-file must hold a key, got {error}.") from None
    for policy in _POLICIES if given.static else ("",):
        url = given.server
        if "://" not in url:
            more = ["--policy", policy] if policy else []
            more += ["--dtype", "float64"] if given.check is not None else []
            url = stack.enter_context(_served([given.server, *more, *given.options]))
        form = serve.TEXT_FORM if given.text else 0
        url = url.rstrip("/").removesuffix("/v1")
        server = serve.CompletionServer(url, key, given.model, form=form)
        server = asyncio.run(serve.find_server(server))
        if given.check is not None and server.form >= serve.TEXT_FORM:
            raise UsageError(f"--check needs token ids, but {url} gets text.")
        servers[policy or server.model] = server
    return servers


@contextmanager
def _served(words: Sequence[str]) -> Generator[str]:
    """Serve a model in a ``with`` block; yield the URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "ronde", "serve", *words, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
    ) as process:
        lines, url = iter(process.stderr or ()), None
        forward = Thread(target=sys.stderr.writelines, args=(lines,), daemon=True)
        try:
            while url is None and (line := next(lines, "")):
                sys.stderr.write(line)
                url = re.search(r"ronde: serving .* at (http://\S+)", line)
            if url is None:
                raise UsageError("ronde serve must start, but it has ended: see above.")
            forward.start()
            yield url[1]
        finally:
            process.terminate()
            if forward.ident:
                forward.join()  # until it and its ranks have ended


def _measure(
    given: Namespace,
    workload: serve.Workload,
    vocabulary: int,
    servers: Mapping[str, serve.CompletionServer],
) -> Runs:
    """Load the servers in turn, in each round with the same requests."""
    runs: Runs = {name: [] for name in servers}

    def load(name: str, drawn: serve.Workload) -> serve.LoadOutcome:
        requests = drawn.draw(vocabulary)
        _require_room(requests, servers[name].max_len)
        gc.freeze()  # no pauses to look through them
        return asyncio.run(serve.run_load(servers[name], requests, given.timeout))

    for name in servers if given.warmup else ():
        load(name, workload._replace(num_requests=given.warmup, rate=0.0, seed=-1))
    for number in range(given.rounds):
        for name in list(servers)[:: -1 if number % 2 else 1]:
            drawn = workload._replace(seed=workload.seed + number)
            runs[name].append(load(name, drawn))
    return runs


def _check(folder: str, runs: Runs) -> bool:
    """Compare all answers with those of ``generate``; return True if any differ."""
    requests = [each for run in runs.values() for one in run for each in one.requests]
    differences: list[str] = []
    pairs = zip(requests, _generate(folder, requests), strict=True)
    for number, (each, right) in enumerate(pairs):
        made = each.token_ids
        if made != right:
            at = [*map(eq, made, right), False].index(False)
            differences.append(
                f"; the first, {number}, has {made[at:][:1]} as token {at}, and not "
                f"{right[at:][:1]} {each.error}".rstrip()
            )
    text = f"# check: {len(differences)} of {len(requests)} answers differ"
    print("".join([text, *differences[:1]]))
    return bool(differences)


def _generate(
    folder: str, requests: Sequence[serve.LoadRequest]
) -> Iterator[list[int]]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind: Any = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float64, local_files_only=True)
    # Without an end of text, which the requests ignore.
    model.generation_config = transformers.GenerationConfig(do_sample=False)
    for each in requests:
        prompt = torch.tensor([each.prompt])
        mask, most = torch.ones_like(prompt), each.max_tokens
        made = model.generate(prompt, attention_mask=mask, max_new_tokens=most)
        yield made[0, len(each.prompt) :].tolist()
