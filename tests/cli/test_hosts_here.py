"""A host that is this machine by its name, and is to be reached by ssh all the same."""

import os
import pwd

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
