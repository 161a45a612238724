"""``horovod.run``: a function called on ranks that are started for it."""

import os
import signal
import sys
import threading

import pytest

from ronde import horovod
from ronde.errors import UsageError


def place(*args, **kwargs):
    from horovod.runner.common.util.env import get_env_rank_and_size

    return get_env_rank_and_size(), args, kwargs


def test_each_rank_returns_its_result() -> None:
    results = horovod.run(place, (1, 2), {"a": [3]}, num_proc=2)
    assert results == [((rank, 2), (1, 2), {"a": [3]}) for rank in range(2)]


def test_what_is_no_module_goes_there_too() -> None:
    added = 5

    def add(number):
        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.tensor([number]), op=hvd.Sum)
        return int(total) + added + hvd.rank()

    assert horovod.run(add, (2,), num_proc=2) == [9, 10]


def test_what_ranks_print_is_shown(capsys) -> None:
    def speak():
        sys.stdout.write("said\n")
        sys.stderr.write("complained\n")

    assert horovod.run(speak) == [None]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("[0] said\n", "[0] complained\n")


def test_hosts_and_a_discovery_script(tmp_path) -> None:
    script = tmp_path / "discover"
    script.write_text("echo localhost:2\necho 127.0.0.1:2\n")
    script.chmod(0o700)
    expected = [(0, 2), (1, 2)]
    elastic = {"num_proc": 2, "min_num_proc": 2, "max_num_proc": 2}
    results = horovod.run(place, **elastic, host_discovery_script=str(script))
    assert [result[0] for result in results] == expected
    hosts = "localhost:2"
    results = horovod.run(place, num_proc=2, min_num_proc=1, hosts=hosts, verbose=True)
    assert [result[0] for result in results] == expected[:1]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def fail():
        from horovod.runner.common.util.env import get_env_rank_and_size

        if get_env_rank_and_size()[0] == 1:
            raise KeyError("my own")

    with pytest.raises(RuntimeError) as caught:
        horovod.run(fail, num_proc=2)
    text = str(caught.value)
    assert text.startswith(
        "Horovod detected that one or more processes exited with non-zero status, thus "
        "causing the job to be terminated. The first process to do so was:\n"
        "Process name: 1\nExit code: 1\n"
    )
    assert "KeyError: 'my own'" in text


def test_a_rank_that_is_killed_is_told_of() -> None:
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"name: one of \[0\]\nExit code: 137\n"):
        horovod.run(die)


def test_a_result_that_cannot_be_pickled_is_told_of() -> None:
    with pytest.raises(RuntimeError, match="cannot pickle"):
        horovod.run(threading.Lock)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"hosts": "a:1", "hostfile": "f"},
            "Argument hosts and hostfile only allow one",
        ),
        (
            {"use_gloo": True, "use_mpi": True},
            "Argument use_gloo and use_mpi only allow",
        ),
        (
            {"num_proc": 4, "hosts": "localhost:2"},
            r"^Requested more processes \(4\) than there are available slots \(2\)\n",
        ),
        (
            {"num_proc": 2, "hosts": "localhost:1,192.0.2.1:1"},
            "^--standalone and .*this machine only, got the host 192.0.2.1. Start",
        ),
        ({"num_proc": 0}, "must be a whole number of at least 1, got '0'"),
    ],
)
def test_what_cannot_be_is_refused(kwargs, message) -> None:
    with pytest.raises(UsageError, match=message):
        horovod.run(place, **kwargs)


def test_old_names_are_understood() -> None:
    with pytest.warns(DeprecationWarning, match="^np is deprecated, use num_proc"):
        results = horovod.run(place, np=2)
    assert len(results) == 2
    with pytest.warns(DeprecationWarning, match="network_interface is deprecated"):
        names = horovod.run(
            lambda: os.environ["HOROVOD_GLOO_IFACE"],  # noqa: TID251
            network_interface="lo,eth0",
        )
    assert names == ["lo,eth0"]


def test_another_python(tmp_path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nWHICH=mine exec {sys.executable} $*\n")
    python.chmod(0o700)

    def which():
        return os.environ["WHICH"]  # noqa: TID251

    assert horovod.run(which, executable=str(python)) == ["mine"]
