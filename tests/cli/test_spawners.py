"""What is run to reach a host, and what a failure of it is told as."""

import os
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.errors import Failure, HostFailure
from ronde.launch import Host, SlurmSpawner, SshSpawner, last_line, start_remote_agent
from ronde.render import tabulate_failures

HOST = Host("node2", user="ada", port=2222)


class Here:
    """A spawner whose every host is this machine, behind a shell that makes noise."""

    name = "ssh"

    def __init__(self, before=""):
        self.before = before
        self.lines = []

    def command(self, host, words):
        line = f"{self.before}exec {shlex.join(words)}"
        self.lines.append(line)
        return ["/bin/sh", "-c", line]

    def explain(self, host, exit_code, said):
        return Failure(f"{exit_code} {said}", "")


def meet(spawner, python=sys.executable):
    """Start an agent; return its wire, the greeting, and what came behind it."""
    link = start_remote_agent(spawner, HOST, python)
    transport, hello_reader = link.transport, link.hello_reader
    rest = None
    while rest is None:
        assert select.select([transport.read_fd], [], [], HANG_S)[0]
        data = transport.read()
        if not data:
            break
        rest = hello_reader.feed(data)
    return transport, hello_reader, rest


def end(transport):
    transport.close()
    return transport.wait(HANG_S)


def test_an_agent_is_met_behind_any_noise():
    noise = "head -c 100000 /dev/zero; echo '{\"python\": 1}'; printf '$ '; "
    transport, hello_reader, rest = meet(Here(noise))
    assert hello_reader.found is not None
    assert hello_reader.found.problem(HOST, "ssh") is None
    assert hello_reader.found.executable == sys.executable
    assert hello_reader.noise.endswith(b'{"python": 1}\n$ ')
    while len(rest) < 5:
        assert select.select([transport.read_fd], [], [], HANG_S)[0]
        rest += transport.read()
    # A frame: its length, its kind, and the agent's first word.
    assert int.from_bytes(rest[:4]) < 1 << 20
    assert end(transport) is not None


def test_a_login_that_writes_back_what_it_is_sent_is_noise():
    echoing = "read -r line; printf '%s\\n' \"$line\"; printf '%s\\n' \"$line\" | "
    transport, hello_reader, _ = meet(Here(echoing))
    assert hello_reader.found is not None
    assert b"bootstrap(" in hello_reader.noise
    end(transport)


def test_the_line_that_others_can_read_is_the_same_for_all():
    spawner = Here()
    greetings = []
    for _ in range(2):
        transport, hello_reader, _ = meet(spawner)
        greetings.append(hello_reader)
        end(transport)
    assert spawner.lines[0] == spawner.lines[1]
    # No login shell, csh included, reads anything in it as its own.
    inner = spawner.lines[0].partition("-c ")[2]
    assert inner.startswith("'")
    assert inner.endswith("'")
    assert not set(inner[1:-1]) & set("'\"!\\`$\n")


def test_a_missing_python_has_exit_code_127():
    transport, hello_reader, rest = meet(Here(), python="/no/python")
    assert (hello_reader.found, rest) == (None, None)
    assert transport.wait(HANG_S) == 127
    transport.close()


def test_a_client_ends_with_its_controller(tmp_path):
    program = (
        "import sys\n"
        "sys.path[:0] = [sys.argv[1]]\n"
        "from tests.cli.test_spawners import HOST, Here, start_remote_agent\n"
        "link = start_remote_agent(Here('exec sleep 1000; '), HOST, 'python3')\n"
        "print(link.transport.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", program, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as controller:
        pid_fd = os.pidfd_open(int(controller.stdout.readline()))
        controller.kill()
    ended = select.select([pid_fd], [], [], HANG_S)[0]
    os.close(pid_fd)
    assert ended


def test_ssh_takes_the_users_words_first_and_the_host_as_nothing_but_that():
    words = SshSpawner(["-F", "my config"]).command(HOST, ["python3", "-c", "a b"])
    assert words[:3] == ["ssh", "-F", "my config"]
    assert words[-3:] == ["--", "node2", "python3 -c 'a b'"]
    assert words[-7:-3] == ["-p", "2222", "-l", "ada"]
    assert "BatchMode=yes" in words
    assert not any("StrictHostKeyChecking" in word for word in words)


KEX = "kex_exchange_identification: read: Connection reset by peer\n"
BAD_OPTION = "/home/ada/.ssh/config: line 3: Bad configuration option: nonsense"
CHANGED = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\n"


@pytest.mark.parametrize(
    ("code", "said", "reason", "cure"),
    [
        (
            255,
            "ada@node2: Permission denied (publickey).",
            "key refused",
            "ssh-copy-id -p 2222 ada@node2",
        ),
        (
            255,
            f"{CHANGED}Host key verification failed.",
            "host key changed: another machine answers, or it was installed anew",
            "find out which; if it is right: ssh-keygen -R '[node2]:2222'",
        ),
        (
            255,
            "Connection timed out during banner exchange",
            "its ssh server takes no more connections now",
            "raise MaxStartups there, or see what it logs",
        ),
        (255, BAD_OPTION, f"ssh failed: {BAD_OPTION}", "ssh -p 2222 ada@node2"),
        (
            126,
            "sh: /etc/passwd: Permission denied",
            "its Python cannot be run: sh: /etc/passwd: Permission denied",
            "name the one there with --python",
        ),
        (
            1,
            "hello\n/opt/python: Command not found.\n",
            "its Python cannot be run: /opt/python: Command not found.",
            "name the one there with --python",
        ),
        (
            -15,
            "",
            "no agent began (signal 15): no output",
            "run a command there by hand and read its output",
        ),
    ],
)
def test_errors_of_ssh_have_a_reason_and_a_remedy(code, said, reason, cure):
    failure = SshSpawner().explain(HOST, code, said)
    assert (failure.reason, failure.cure) == (reason, cure)


@pytest.mark.parametrize(
    ("said", "is_transient"),
    [
        (KEX, True),
        (
            "ssh: Could not resolve hostname a: Temporary failure in name resolution",
            True,
        ),
        ("ssh: Could not resolve hostname a: Name or service not known", False),
        (
            "a: Permission denied (publickey).\nConnection closed by 10.0.0.2 port 22",
            False,
        ),
        (f"{CHANGED}{KEX}", False),
    ],
)
def test_transient_errors_are_recognized(said, is_transient):
    assert SshSpawner().explain(HOST, 255, said).is_transient == is_transient


NO_PYTHON = "stepd: error: execve(): /no/python: No such file or directory"
NO_JOB = "srun: error: Unable to create step: Invalid job id specified"
CHATTER = "srun: cluster configuration lacks support for cpu binding\n"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            f"{NO_PYTHON}\nsrun: error: node2: task 0: Exited with exit code 2",
            f"its Python is not there: {NO_PYTHON}",
        ),
        (NO_JOB, f"the allocation is over: {NO_JOB}"),
        (CHATTER, "no agent began (exit code 2): no output"),
    ],
)
def test_errors_of_srun_have_a_reason(said, reason):
    assert SlurmSpawner().explain(HOST, 2, said).reason == reason


def test_control_characters_of_a_host_are_removed():
    assert last_line("one\n\x1b[2Jtwo\x07\x9b\n \n") == "[2Jtwo"
    assert last_line(" \n") == ""
    assert len(last_line("x" * 10_000)) == 200


def test_hosts_with_one_failure_share_a_line_of_the_table():
    refused = Failure("key refused", "ssh-copy-id")
    failures = [
        HostFailure("a", refused),
        HostFailure("b", Failure("unknown name", "check the spelling")),
        *(HostFailure(f"n{i}", refused) for i in range(12)),
    ]
    ready = [f"r{i}" for i in range(9)]
    lines = tabulate_failures(failures, ready).splitlines()
    assert [line.removeprefix("ronde:   ").split("  ")[0] for line in lines] == [
        "host",
        "a, n0, n1, n2, n3, n4, n5, n6 and 5 more",
        "b",
        "ready: r0, r1, r2, r3, r4, r5, r6, r7 and 1 more",
    ]
    column = lines[0].index("what is wrong")
    assert [line[column:].split("  ")[0] for line in lines[1:3]] == [
        "key refused",
        "unknown name",
    ]
