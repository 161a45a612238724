"""What ``ronde run`` says when nodes are to join and the words do not fit."""

import os
import socket

import pytest

from ronde.cli import make_run_parser, read_run_request
from ronde.errors import UsageError

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2", "true"], "let nodes join: --listen and --agent"),
        (["--token-file", "x", "true"], "--token-file has no effect without --listen"),
        (["--listen", "1", "true"], "--nodes must be a whole number of at"),
        (["--listen", "1", "--nodes", "1", "true"], "2, got '1'. With --listen"),
        (["--listen", "a:b", "--nodes", "2", "true"], "--listen must be HOST:PORT"),
        (["--listen", "1", "--nodes", "2"], "a program is required"),
        (["--listen", "1", "--nodes", "2", "--token-file", "TOKEN", "a.py"], "neither"),
        (["--listen", "1", "-H", "a:1", "true"], "-H cannot be combined with --listen"),
        (["--listen", "1", "--python", "x", "true"], "--python cannot be combined"),
        (["--join-timeout", "1s", "true"], "--join-timeout has no effect without"),
        (["--listen", "1", "--agent", "a:1"], "--agent and --listen cannot be used"),
        (["--agent", "a:0"], "--agent must be HEAD:PORT, got"),
        (["--agent", "a:1", "true"], "--agent cannot be combined with a program"),
        (["--agent", "a:1"], "--token-file is required"),
        (["--agent", "a:1", "--token-file", "TOKEN", "--slots", "0"], "--slots"),
        (["--agent", "a:1", "--token-file", "TOKEN", "--join-timeout", "x"], "--join-"),
        (["--agent", "a:1", "--token-file", "TOKEN", "--nproc-per-node", "0"], "--np"),
    ],
)  # fmt: skip
def test_invalid_options_end_with_64_and_one_sentence(ronde_here, token, words, said):
    done = ronde_here("run", *(token if word == "TOKEN" else word for word in words))
    errors = done.stderr.decode()
    assert done.returncode == 64, errors
    assert said in errors
    assert len(errors.splitlines()) == 1


def test_a_node_takes_no_option_that_the_head_alone_heeds():
    """All options but those few, whatever they are."""
    heeded = {"agent", "token_file", "join_timeout", "slots", "nproc_per_node"}
    refused = {
        action.option_strings[0]: action
        for action in make_run_parser().options.values()
        if action.dest not in heeded | {"help", "listen"}
    }
    assert len(refused) > 40
    words_of = {"--launcher": "ssh", "--failure-domain": "slot", "--bind": "core"}
    words_of |= {"--bind-policy": "restricted", "--gpu-view": "one"}
    for name, action in refused.items():
        words = ["--agent", "a:1", action.option_strings[-1]]
        count = 0 if action.const is not None else action.nargs or 1
        with pytest.raises(
            UsageError, match=f"^{name} cannot be combined with --agent"
        ):
            read_run_request([*words, *[words_of.get(name, "1")] * int(count)], {})


def test_a_token_file_that_everybody_can_read_starts_nothing(ronde_here, token):
    os.chmod(token, 0o644)  # noqa: PTH101
    words = ("--listen", "127.0.0.1:0", "--nodes", "2", "--token-file", token, "true")
    done = ronde_here("run", *words)
    assert done.returncode == 64
    assert b"chmod 600" in done.stderr
    assert TOKEN.encode() not in done.stderr


def test_a_head_that_nobody_joins_ends_with_69_and_says_what_to_start(
    ronde_here, token
):
    done = ronde_here(
        *("run", "--listen", "127.0.0.1:0", "--nodes", "2", "--token-file", token),
        *("--join-timeout", "300ms", "true"),
    )
    errors = done.stderr.decode()
    assert done.returncode == 69, errors
    assert "only 0 of 1 nodes joined within 0.3 s: none. Run on" in errors


def test_a_head_in_a_pod_asks_nobody_to_type_a_command(ronde, token):
    here = {"RONDE_NODES": "2", "RONDE_NODE_INDEX": "0", "RONDE_HEAD": "127.0.0.1:0"}
    done = ronde(
        *("run", "--join-timeout", "300ms", "true"),
        env={**here, "RONDE_TOKEN_FILE": token},
    )
    errors = done.stderr.decode()
    assert done.returncode == 69, errors
    assert "waiting for 1 node to join " in errors
    assert "within 0.3 s: none. Look for the other pods with kubectl" in errors
    assert "--agent" not in errors


def test_a_node_without_a_head_ends_with_69_and_says_why(ronde, token):
    with socket.socket() as closed:
        # It is bound and does not listen: nobody else answers there.
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        done = ronde(
            *("run", "--agent", f"127.0.0.1:{port}", "--join-timeout", "300ms"),
            env={"RONDE_TOKEN_FILE": token},
        )
    errors = done.stderr.decode()
    assert done.returncode == 69, errors
    assert "within 0.3 s: nothing listens there" in errors
