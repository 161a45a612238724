"""Hosts that a command or a file names while the job runs."""

import time
from pathlib import Path

import pytest
from tests.limits import HANG_S

from ronde.launch import (
    NO_LIMIT,
    SLOTS_OPEN,
    DiscoverySpec,
    ElasticOptions,
    Host,
    HostChanges,
    open_discovery,
)
from ronde.processes import adopting_orphans, children, read_process

OPTION = "--host-discovery"
EVERY_S = 0.02
LIMIT_S = 10.0
START = (Host("a", 2), Host("b", 2))


class Followed:
    """A discovery, served as an event loop does."""

    def __init__(self, source, hosts=START, *, is_file=False, **spec):
        spec = DiscoverySpec(OPTION, str(source), is_file, **spec)
        options = ElasticOptions(1, NO_LIMIT, 0, spec, EVERY_S)
        self.hosts = hosts
        self.num_changes = 0
        self.discovery = open_discovery(options, hosts, time.monotonic())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.discovery.close()

    @property
    def slots(self):
        return {host.name: host.slots for host in self.hosts}

    @property
    def notice(self):
        [notice] = self.discovery.notices
        return notice

    def turn(self, ahead_s=0.0):
        """Wait as the loop does, then advance, by a clock that is that much ahead.

        That never waits: no script that hangs here ends before it was left alone.
        """
        discovery = self.discovery
        time.sleep(max(0.0, min(discovery.due_s - time.monotonic(), 1.0)))
        changed = discovery.advance(time.monotonic() + ahead_s)
        if changed is not None:
            self.hosts = changed
            self.num_changes += 1

    def until(self, is_done):
        ends_s = time.monotonic() + HANG_S
        while not is_done():
            assert time.monotonic() < ends_s
            self.turn()


@pytest.fixture
def scripted(tmp_path):
    """Return a script that runs these lines one after the other, a run each.

    The last one stays; ``num_runs`` counts.
    """

    class Scripted:
        def __init__(self, *lines):
            self.count = tmp_path / "count"
            self.count.write_text("")
            cases = [f"{n}) {line};;" for n, line in enumerate(lines[:-1], 1)]
            self.path = tmp_path / "discover"
            self.path.write_text(
                f"#!/bin/sh\nprintf . >> {self.count}\n"
                f"case $(wc -c < {self.count}) in\n"
                + "\n".join((*cases, f"*) {lines[-1]};;", "esac\n"))
            )
            self.path.chmod(0o700)

        def __str__(self):
            return str(self.path)

        @property
        def num_runs(self):
            return self.count.stat().st_size

    return Scripted


def names(hosts):
    return "".join(host.name for host in hosts)


def told(changes, answer):
    """Take an answer such as ``a2 b0``; return the hosts that count, so written."""
    hosts = [Host(word[0], int(word[1:])) for word in answer.split()]
    changes.update(hosts)
    return " ".join(f"{host.name}{host.slots}" for host in changes.hosts)


@pytest.mark.parametrize(
    "answers",
    [
        # Each with what counts after it.
        {"a2 b2 c1": "a2 b2 c1"},
        {"a3 b2": "a3 b2"},
        {"c1 b2 a2": "a2 b2 c1"},
        {"a2": "a2 b2", "a2 ": "a2"},
        {"a2": "a2 b2", "a2 b2": "a2 b2", " a2": "a2 b2", " a2 ": "a2"},
        {"a2 b1": "a2 b2", "a2 b1 ": "a2 b1"},
        {"a2 b0": "a2 b2", "a2 b0 ": "a2 b0", "a2 b2": "a2 b2"},
        {"a2 b1": "a2 b2", "b2": "a2 b2", "b2 ": "b2"},
        {"c1": "a2 b2 c1", "c1 ": "c1", "a2": "c1 a2", "a2 ": "a2"},
    ],
)
def test_new_hosts_count_at_once_and_missing_ones_the_second_time(answers):
    changes = HostChanges(START)
    for answer, counts in answers.items():
        assert told(changes, answer) == counts


def test_an_unchanged_answer_returns_nothing():
    changes = HostChanges(START)
    assert changes.update([Host("a", 2, named_at="line 7"), *START[1:]]) is None
    assert changes.update([Host("a", 2), Host("b", 2, port=22)]) is not None


def test_hosts_join_leave_and_are_drained(scripted):
    script = scripted("echo a:2; echo c:4; echo b:2", "echo c:4; echo a:0")
    with Followed(script) as followed:
        followed.until(lambda: followed.num_changes == 1)
        assert script.num_runs == 1
        assert names(followed.hosts) == "abc"
        followed.until(lambda: followed.num_changes == 2)
        assert script.num_runs == 3
        assert followed.slots == {"a": 0, "c": 4}


def test_a_host_that_is_named_twice_counts_once(scripted):
    script = scripted(
        "echo a:2; echo b:8; echo b:4; echo c; echo c; echo '[fd00::1]:3'"
    )
    with Followed(script) as followed:
        followed.until(lambda: script.num_runs > 4)
        found = {"a": 2, "b": 4, "c": SLOTS_OPEN, "fd00::1": 3}
        assert followed.slots == found
        where = f"{OPTION} {script} line"
        assert followed.notice == (
            f"{where} 2: b is named 2 times. It counts once, with 4 slots. "
            f"{where} 4: c is named 2 times. It counts once, without slots."
        )


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("echo a:2; echo 'no host!'", "line 2, column 4: expected key=value"),
        (
            "echo a:2; echo b:x",
            "slots of b must be a whole number from 0 to 65536, got",
        ),
        ("true", "names no host. Write a line such as n1 slots=4"),
        ("echo a:2; exit 3", "failed: exit code 3. Run it by hand."),
        ("echo no kubectl here >&2; exit 1", "exit code 1: no kubectl here"),
        ("kill -9 $$", "exit code 137"),
        (r"printf '\377'", "as UTF-8"),
        ("yes >&2 & yes a:2", "printed more than 1 MiB"),
    ],
)
def test_a_bad_answer_is_refused_and_the_last_one_stays(scripted, answer, shown):
    script = scripted(answer)
    before = children()
    with Followed(script) as followed:
        followed.until(lambda: script.num_runs > 3)
        assert followed.num_changes == 0
        # Each run failed alike, and that is one notice.
        assert shown in followed.notice
        assert str(script) in followed.notice
        assert len(followed.notice) < 500
    assert children() == before


@pytest.mark.waits
def test_a_script_that_hangs_is_killed_with_all_that_it_started(scripted, tmp_path):
    left = tmp_path / "left"
    hangs = f"setsid sleep 1000 & sleep 999 & echo $$ $! > {left}; echo a:9; sleep 1000"
    script = scripted(hangs, "echo a:2; echo b:2; echo c:2")
    before = children()
    with adopting_orphans(), Followed(script) as followed:
        followed.until(lambda: left.exists() and left.read_text().endswith("\n"))
        followed.turn(LIMIT_S - 1)
        assert followed.discovery.notices == []
        processes = [read_process(int(pid)) for pid in left.read_text().split()]
        assert all(processes)
        followed.turn(LIMIT_S + 1)
        assert "it took longer than 10 s. Run it by hand." in followed.notice
        followed.turn(LIMIT_S + 2)
        followed.until(lambda: followed.num_changes)
        assert followed.slots == {"a": 2, "b": 2, "c": 2}
        followed.until(lambda: not any(read_process(p.pid) for p in processes))
    assert children() - before <= {p for p in children() if read_process(p).is_zombie}


def test_processes_left_by_a_script_are_killed(scripted):
    script = scripted("sleep 1000 & echo a:2; echo b:2; echo p$!:1")
    with Followed(script) as followed:
        followed.until(lambda: followed.num_changes == 1)
        pid = int(followed.hosts[-1].name[1:])
        followed.until(lambda: (p := read_process(pid)) is None or p.is_zombie)


def test_many_runs_leave_nothing_open(scripted):
    script = scripted("echo a:2; echo b:2")
    before = children(), set(Path("/proc/self/fd").iterdir())
    with Followed(script) as followed:
        followed.until(lambda: script.num_runs > 30)
    assert (children(), set(Path("/proc/self/fd").iterdir())) == before


def test_slots_ranks_and_port_are_as_for_the_first_hosts():
    hosts = (Host("localhost", 2), Host("a", 2, port=7))
    command = "echo localhost; echo a; echo b port=9; echo c"
    with Followed(command, hosts, slots=4, num_each=2, ssh_port=22) as followed:
        followed.until(lambda: followed.num_changes == 1)
        assert [(h.slots, h.port) for h in followed.hosts] == [
            *((2, 0), (2, 7), (2, 9), (2, 22))
        ]
    with Followed("echo a:1", num_each=2) as followed:
        followed.until(lambda: followed.discovery.notices)
        assert "--nproc-per-node must be at most the slots of every" in followed.notice


def test_a_job_of_this_machine_takes_no_other():
    with Followed("echo a:2; echo b:2; echo n9:2", is_local=True) as followed:
        followed.until(lambda: followed.discovery.notices)
        assert (
            "--standalone and horovod.run() use this machine alone" in followed.notice
        )
        assert "got n9" in followed.notice
        assert followed.num_changes == 0


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=2\n")
    return path


def test_a_host_file_is_followed(hostfile, tmp_path):
    with Followed(hostfile, is_file=True) as followed:
        with hostfile.open("a") as file:
            file.write("c\nc\nc # three\n")
        followed.until(lambda: followed.num_changes == 1)
        assert followed.slots == {"a": 2, "b": 2, "c": 3}
        new = tmp_path / "new"
        new.write_text("b:2 // [fd00::2]\nd[1-2] count=4\n")
        new.rename(hostfile)
        followed.until(lambda: followed.num_changes == 3)
        assert followed.slots == {"b": 2, "d1": 4, "d2": 4}
    assert followed.discovery.notices == []


def test_a_file_that_is_being_written_does_not_count_yet(hostfile):
    with Followed(hostfile, is_file=True) as followed:
        followed.until(lambda: followed.discovery.due_s > 0)
        for text in ("", "a slots=2\nb slots=2\nno", "a slots=2\nb slots=2\nnode1 sl"):
            hostfile.write_text(text)
            followed.turn()
        hostfile.write_text("a slots=2\nb slots=2\nnode12 slots=4\n")
        followed.until(lambda: followed.num_changes == 1)
        assert followed.slots == {"a": 2, "b": 2, "node12": 4}
    assert followed.discovery.notices == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, "no such file. Check the path."),
        ("", "names no host"),
        (
            "a slots=2\nb slots=x\n",
            "hosts line 2, column 9: slots must be a whole number",
        ),
    ],
)
def test_a_bad_host_file_is_refused_and_the_last_one_stays(hostfile, text, shown):
    with Followed(hostfile, is_file=True) as followed:
        hostfile.unlink()
        if text is not None:
            hostfile.write_text(text)
        followed.until(lambda: followed.discovery.notices)
        for _ in range(5):
            followed.turn()
        assert shown in followed.notice
        hostfile.write_text("a slots=2\nb slots=2\nc slots=1\n")
        followed.until(lambda: followed.num_changes == 1)
        assert names(followed.hosts) == "abc"
