"""A host that is this machine by its name, and is to be reached by ssh all the same."""

import os
import pwd
import socket

import pytest

from ronde.launch import Host, is_here

OWN_NAME = pwd.getpwuid(os.geteuid()).pw_name
NOBODY = "no-such-user-here"


def test_this_machine_as_this_user_is_here() -> None:
    assert is_here(Host("localhost", user=OWN_NAME))


@pytest.mark.parametrize(
    "host",
    [
        Host("localhost", user=NOBODY),
        Host("localhost", port=22),
        Host(os.uname().nodename, user=OWN_NAME, port=2222),
    ],
)
def test_another_user_or_a_port_is_elsewhere(host) -> None:
    assert not is_here(host)


@pytest.mark.parametrize("verb", ["run", "check"])
def test_nothing_runs_here_for_another_user(ronde, tmp_path, verb) -> None:
    trace = tmp_path / "trace"
    program = ["--", "touch", str(trace)] if verb == "run" else []
    done = ronde(verb, "-H", f"{NOBODY}@localhost:1", *program)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode != 0, said
    assert f"{NOBODY}@localhost" in said or "ssh does not start" in said
    assert not trace.exists()


def test_nothing_runs_here_for_another_port(ronde, tmp_path) -> None:
    trace, hostfile = tmp_path / "trace", tmp_path / "hosts"
    with socket.socket() as closed:
        # It is bound and does not listen: nobody else answers there.
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        hostfile.write_text(f"127.0.0.1 port={port} slots=1\n")
        done = ronde("run", "--hostfile", str(hostfile), "--", "touch", str(trace))
    said = done.stderr.decode()
    assert done.returncode == 69, said
    assert "nothing answers on its ssh port" in said or "ssh does not start" in said
    assert not trace.exists()
