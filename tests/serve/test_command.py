"""``ronde serve`` as users type it: the page's program, a lost rank, and bad input."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from examples.make_llama import make_model
from openai import OpenAI
from tests.limits import HANG_S

from ronde.cli import main

PAGE = (Path(__file__).parents[2] / "docs/how-to/serve.md").read_text()
[PROGRAM] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_model(str(folder))
    return folder


def test_a_lost_rank_is_a_pause_for_the_pages_program(model):
    command = [sys.executable, "-m", "ronde", "serve", model, "-n", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = _read(server, r"serving llama at (http://[\d.:]+/v1)")
            program = PROGRAM.replace("http://127.0.0.1:8000/v1", address)
            run = [sys.executable, "-c", program]
            once, again = (
                subprocess.run(
                    run, capture_output=True, text=True, check=True, timeout=HANG_S
                ).stdout
                for _ in range(2)
            )
            assert once == again != ""
            client = OpenAI(base_url=address, api_key="none", max_retries=0)
            whole = _complete(client)
            assert len(whole) == 400
            os.kill(_worker_of(server.pid), signal.SIGKILL)
            assert _complete(client) == whole
            reason = _read(server, r"ready again after [\d.]+ s: (.*)")
            assert reason == "rank 1 was ended by SIGKILL"
        finally:
            server.terminate()
            server.stderr.read()
    assert server.returncode == 0


def _complete(client):
    stream = client.completions.create(
        model="llama",
        prompt=[7, 8, 9],
        max_tokens=400,
        temperature=0.9,
        seed=3,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return [token for chunk in stream for token in chunk.choices[0].token_ids]


def _read(server, pattern):
    for line in server.stderr:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError("the server has ended")


def _worker_of(server):
    """Return the process that does the work of rank 1."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = (entry / "comm").read_text() == "ronde-worker\n"
            is_own = f'"front": [{server},' in (entry / "cmdline").read_text()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_worker and is_own and b"RANK=1" in variables:
            return int(entry.name)
    raise AssertionError("rank 1 has no worker")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-n 3", "tp must divide the model's 4 KV heads, got 3. Take one of 1, 2, 4."),
        ("-n 4 --tp 3", "-n must be a multiple of --tp, got -n 4 and --tp 3."),
        ("-H a:4", "-n must be given with -H"),
        ("-H a:4 -n 4 --tp 2", "--tp must be -n with -H"),
        ("--host 0.0.0.0", "a server at 0.0.0.0 must have a key"),
        ("--api-key-file /dev/null", "--api-key-file must hold a key"),
        ("--port 70000", "--port must be a whole number from 0 to 65535"),
        ("--kv-memory 2", "--kv-memory must be a number above 0 and below 1"),
        ("--max-model-len 5000", "--max-model-len must be at most 4096"),
        ("--engine other", "engine must be transformers, vllm or MODULE:FACTORY"),
        ("--policy none", "--policy must be guaranteed_no_evict, max_utilization or"),
        ("--metrics-prefix 7", "metrics prefix must be"),
        ("--chat-template /none", "/none"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(model, capsys, words, sentence):
    assert main(["serve", str(model), *words.split()]) == 64
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_used_port_and_a_folder_without_model_are_refused(model, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert main(["serve", str(model), "--port", port]) == 64
    assert "must be a free address of this machine" in capsys.readouterr().err
    assert main(["serve", str(tmp_path)]) == 64
    assert "config.json" in capsys.readouterr().err
