import os
import re
import signal
import subprocess

import pytest

from ronde.cli import read_run_request
from ronde.errors import UsageError
from ronde.launch import SLOTS_OPEN, discover
from ronde.processes import read_process

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


def asked(*words, environ=()):
    return read_run_request([*words, "train.py"], dict(environ))


def slots(*words, environ=()):
    """Return the slots of the hosts that these words name."""
    return {host.name: host.slots for host in asked(*words, environ=environ).spec.hosts}


@pytest.fixture
def sources(tmp_path):
    """Write a host file and a discovery script; return the ways to name hosts."""
    hostfile = tmp_path / "hosts"
    hostfile.write_bytes(b"\xef\xbb\xbf# ours\r\na\r\nb slots=4\r\n")
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho a; echo; echo b:4\n")
    script.chmod(0o700)
    return {
        "-H": ("-H", "a,b:4"),
        "--hosts": ("--hosts=a,b:4",),
        "--hostfile": ("--hostfile", str(hostfile)),
        "-hostfile": ("-hostfile", str(hostfile)),
        "script": ("--host-discovery-script", str(script)),
        "command": ("--host-discovery-script", f"{script} --verbose"),
    }


def test_every_source_names_hosts(sources) -> None:
    for words in sources.values():
        assert slots(*words) == {"a": SLOTS_OPEN, "b": 4}


def test_slots_are_for_hosts_that_say_none(sources) -> None:
    for words in sources.values():
        assert slots(*words, "--slots", "2") == {"a": 2, "b": 4}
        assert slots(*words, "--slots-per-host", "2") == {"a": 2, "b": 4}


def test_named_hosts_come_before_slurms_allocation(sources) -> None:
    for words in sources.values():
        assert slots(*words, environ=SLURM) == {"a": SLOTS_OPEN, "b": 4}


def test_slurms_allocation_counts_before_this_machine() -> None:
    assert slots(environ=SLURM) == {"n1": 2, "n2": 2}
    assert slots("--slots", "8", environ=SLURM) == {"n1": 8, "n2": 8}


def test_without_a_word_this_machine_is_meant() -> None:
    here = os.uname().nodename
    assert slots() == {here: SLOTS_OPEN}
    assert slots("--slots", "3") == {here: 3}
    assert slots(environ={"SLURM_JOB_ID": "7"}) == {here: SLOTS_OPEN}


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "-H a --hostfile b": "--hosts cannot be combined with --hostfile. Drop one.",
        "-H a --host-discovery-script b": "--hosts cannot be combined with",
        "-H a:1,b:2 --slots 4": "--slots 4 has no effect, as every host is "
        "given with its own slots, such as a:1. Drop one of the two.",
        "--slots 0": "--slots must be a whole number from 1 to 65536, got '0'",
        "-H=": "-H names no host. Type names such as a:2,b:4",
        "-H a:x": "-H: slots of a must be a whole number",
        "--hostfile /no/such": "cannot read '/no/such', given with --hostfile",
        "--hostfile /dev/null": "/dev/null names no host",
        "--host-discovery-script false": "--host-discovery-script: 'false' failed: "
        "exit code 1. Run it by hand.",
        "--host-discovery-script true": "--host-discovery-script true names no host",
        "-p 0": "--ssh-port must be a whole number from 1 to 65535, got '0'",
    }.items(),
)
def test_invalid_options_are_refused(words, said) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        asked(*words.replace("-H=", "--hosts=").split())


def test_a_script_that_prints_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="as UTF-8: "):
        asked("--host-discovery-script", r"printf '\377'")


def test_a_script_that_hangs_is_ended_with_all_that_it_started(tmp_path) -> None:
    left = tmp_path / "left"
    script = f"setsid sleep 1000 & echo $$ $! > {left}; echo a; sleep 1000"
    said = "failed: it took longer than 0.3 s"
    with pytest.raises(UsageError, match=said):
        discover(script, "--host-discovery-script", timeout_s=0.3)
    assert not any(read_process(int(pid)) for pid in left.read_text().split())


def test_orphans_are_not_adopted_after_a_script() -> None:
    assert asked("--host-discovery-script", "echo a").spec.hosts
    words = ["sh", "-c", "sleep 1000 >/dev/null & echo $!"]
    orphan = read_process(int(subprocess.check_output(words)))
    assert orphan is not None
    os.kill(orphan.pid, signal.SIGKILL)
    assert orphan.parent != os.getpid()


def test_horovods_ssh_options_are_for_ssh(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a port=23\nb\n")
    words = ("-p", "22", "-i", "key file", "--hostfile", str(path))
    found = asked(*words)
    assert [host.port for host in found.spec.hosts] == [23, 22]
    assert found.horovod.ssh_args == ("-i", "key file")
    assert found.horovod.ignored == ()
    assert asked().horovod.ssh_args == ()


def test_horovods_ssh_port_is_that_of_other_hosts() -> None:
    hosts = asked("-p", "22", "-H", "192.0.2.1:1,localhost:1,192.0.2.2:1").spec.hosts
    assert [host.port for host in hosts] == [22, 0, 22]
