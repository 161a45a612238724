"""An ``ssh`` that hangs: it is ended in time, and one sentence says so."""

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests import timed
from tests.cli.conftest import Ronde, clean_environment
from tests.limits import HANG_S

from ronde.processes import read_processes

pytestmark = pytest.mark.waits

HANG = "trap '' TERM; tail -f /dev/null"


def fake_ssh(directory, start):
    """Make an ``ssh``; return the words and the environment to use it by."""
    program = directory / "ssh"
    program.write_text(f"#!/bin/sh\n{start}\n")
    program.chmod(0o755)
    path = f"{directory}:{os.defpath}"
    words = ["run", "--launcher", "ssh", "-H", "node.invalid:1", "true"]
    return words, {"PATH": path, "IN_A_TEST": str(directory)}


def marked(directory):
    """Return the processes that were started with a test's environment."""
    mark = f"IN_A_TEST={directory}".encode()
    return [pid for pid in read_processes() if mark in environment(pid).split(b"\0")]


def environment(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_an_ssh_that_starts_nothing_is_given_up_and_ended(tmp_path):
    words, env = fake_ssh(tmp_path, HANG)
    done = Ronde(timed.ronde(connect_s=3))("run", "-v", *words[1:], env=env)
    assert done.returncode == 69, done.stderr
    assert b"no answer from it within 3 s" in done.stderr
    waiting = (
        b"ronde: waiting for node.invalid to answer (login, start of Python there), 2"
    )
    assert done.stderr.count(waiting) == 1
    assert marked(tmp_path) == []


def test_a_slow_start_says_what_it_waits_for(ronde, tmp_path):
    words, env = fake_ssh(tmp_path, HANG)
    with ronde.start("run", "-v", *words[1:], env=env) as process:
        try:
            said = process.stderr.readline().decode()
            assert "waiting for node.invalid to answer" in said
            assert "2 s so far" in said
            process.send_signal(signal.SIGQUIT)
            assert "waiting for node.invalid" in process.stderr.readline().decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 130
        finally:
            process.kill()
    assert marked(tmp_path) == []


def test_verbose_says_how_long_each_step_took(ronde):
    done = ronde("run", "-v", "-n", "2", "/bin/true")
    said = done.stderr.decode()
    steps = ("1 of 1 hosts answered in ", "program and directory checked in ")
    for step in (*steps, "2 of 2 ranks started in "):
        assert said.count(f"ronde: {step}") == 1
    assert ronde("run", "-n", "2", "/bin/true").stderr == b""


def test_timeout_ends_a_start_too_and_says_what_it_waited_for(ronde, tmp_path):
    words, env = fake_ssh(tmp_path, HANG)
    done = ronde("run", "--timeout", "1s", *words[1:], env=env)
    assert done.returncode == 124
    waiting, ended = done.stderr.decode().splitlines()
    assert waiting.startswith("ronde: waiting for node.invalid to answer")
    assert ended == "ronde: --timeout ended the job, exit code 124"
    assert marked(tmp_path) == []
    script = ("--host-discovery-script", "sleep 1000")
    done = ronde("run", "--timeout", "500ms", *script, "true", env=env)
    assert (done.returncode, done.stdout) == (124, b"")
    assert done.stderr == b"ronde: --timeout 500ms expired during the start\n"
    assert marked(tmp_path) == []


def test_a_slow_name_server_is_reported(ronde, tmp_path):
    if os.geteuid():
        pytest.skip("only root may have another resolv.conf")
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.9\noptions timeout:1 attempts:3\n")
    script = 'mount --bind "$0" /etc/resolv.conf; exec "$@"'
    alone = ["unshare", "--mount", "sh", "-ec", script, str(resolver)]
    words, env = fake_ssh(tmp_path, "exit 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.9", 53))
        done = subprocess.run(
            [*alone, *ronde.command(*words)],
            env=clean_environment() | env,
            capture_output=True,
            timeout=HANG_S,
            check=False,
        )
    assert done.returncode == 69
    assert re.search(
        rb"^ronde: node.invalid was looked up in \d+(.\d+)?s.$",
        done.stderr,
        re.MULTILINE,
    )
