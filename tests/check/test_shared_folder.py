"""Hosts find out if they share a folder: they write files and look for others."""

import json
import os
import threading
from contextlib import ExitStack

import pytest
from tests.limits import HANG_S

from ronde.check import (
    NUM_SAMPLES,
    SAMPLE_BYTES,
    WHOLE_BYTES,
    Fleet,
    HostFacts,
    HostSet,
    NodeContext,
    Severity,
    Value,
    all_checks,
    digest,
    find_shared,
    run_tasks,
    try_path,
)
from ronde.launch import Answer


class Programs:
    """Those of hosts, in this process; each has a directory of its own.

    It answers as ``RemotePrograms`` do: lines of JSON in and out.
    """

    def __init__(self, folders):
        self.folders = folders
        self.asked: list[tuple[str, str]] = []
        self.lost: set[str] = set()
        self.lost_after: tuple[str, str] = ("", "")

    def ask(self, questions, timeout_s):
        answers: dict[str, Answer] = {}

        def answer(host, line):
            question: dict[str, Value] = json.loads(line)
            task = question["task"]["do"]
            self.asked.append((host, task))
            if host in self.lost:
                answers[host] = Answer("", "it is gone")
                return
            question["path"] = str(self.folders[host]) + question["path"]
            context = NodeContext({}, ExitStack())
            assert question["do"] == "try_path"
            outcome = try_path(context, question)
            answers[host] = Answer(json.dumps(outcome), "", 0.0, 0.0)
            if (host, task) == self.lost_after:
                self.lost.add(host)

        threads = [
            threading.Thread(target=answer, args=(host, line))
            for host, line in questions.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        return {host: answers[host] for host in questions}


def hosts_of(programs, **settings):
    return HostSet(programs, dict.fromkeys(programs.folders, ""), settings)  # type: ignore[arg-type]


def shared_of(hosts):
    return {host: facts.values["storage.shared"] for host, facts in hosts.facts.items()}


def findings_of(hosts):
    fleet = Fleet(tuple(hosts.facts.values()), hosts.settings)
    return [finding for check in sharing_checks() for finding in check.find(fleet)]


def sharing_checks():
    return (check for check in all_checks() if check.id.startswith("shared-folder"))


def test_hosts_that_share_a_folder_leave_nothing_behind(tmp_path):
    hosts = hosts_of(Programs(dict.fromkeys(("a", "b", "c"), tmp_path)), paths=[""])
    find_shared(hosts)
    assert shared_of(hosts) == {
        "a": {"": {"b": True, "c": True}},
        "b": {"": {"a": True, "c": True}},
        "c": {"": {"a": True, "b": True}},
    }
    assert findings_of(hosts) == []
    assert list(tmp_path.iterdir()) == []


def test_a_host_with_another_folder_is_named(tmp_path):
    own = tmp_path / "own"
    common = tmp_path / "common"
    for each in (own, common):
        (each / "data").mkdir(parents=True)
    hosts = hosts_of(Programs({"a": common, "b": common, "c": own}), paths=["/data"])
    find_shared(hosts, 0.0)
    assert shared_of(hosts)["c"] == {"/data": {"a": False, "b": False}}
    assert shared_of(hosts)["a"] == {"/data": {"b": True, "c": False}}
    (finding,) = findings_of(hosts)
    assert finding.host == "c"
    assert finding.severity is Severity.FAIL
    assert finding.message == "/data shows files of c"
    assert finding.usual == "files of a, b on 2 hosts"
    assert not [*own.glob("*/*"), *common.glob("*/*")]


def test_files_of_a_lost_host_are_removed(tmp_path):
    programs = Programs(dict.fromkeys(("a", "b", "c"), tmp_path))
    programs.lost_after = ("b", "mark")
    hosts = hosts_of(programs, paths=[""])
    find_shared(hosts)
    assert shared_of(hosts)["a"] == {"": {"b": True, "c": True}}
    assert shared_of(hosts)["b"] == {}
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(tmp_path):
    class Ended(Exception):  # noqa: N818
        pass

    class Ending(Programs):
        def ask(self, questions, timeout_s):
            if "find" in next(iter(questions.values())):
                assert len(list(tmp_path.iterdir())) == 2
                raise Ended
            return super().ask(questions, timeout_s)

    hosts = hosts_of(Ending(dict.fromkeys(("a", "b"), tmp_path)), paths=[""])
    with pytest.raises(Ended):
        find_shared(hosts)
    assert list(tmp_path.iterdir()) == []


def test_late_files_are_waited_for(tmp_path):
    file = tmp_path / "x"
    os.mkfifo(file)

    def come():
        # The pipe opens where it is being read: there was no such file until then.
        with file.open("wb"):
            (tmp_path / "y").write_text("x")
            (tmp_path / "y").rename(file)

    coming = threading.Thread(target=come)
    coming.start()
    task = {"do": "find", "path": str(tmp_path), "names": ["x"], "patience_s": HANG_S}
    [[outcome]] = run_tasks([[task]], HANG_S)
    coming.join()
    assert outcome == {"seen": ["x"]}


def test_a_large_file_is_distinguished_from_another_by_its_samples(tmp_path):
    size = 2 * WHOLE_BYTES
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        with path.open("wb") as file:
            file.truncate(size)
    assert digest(str(one)) == digest(str(other))
    with other.open("r+b") as file:
        file.seek(15 * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
        file.write(b"x")
    assert digest(str(one)) != digest(str(other))


def host(name, path, seen):
    return HostFacts(name, {"storage.shared": {path: seen}}, {}, {})


def judged(*hosts):
    fleet = Fleet(hosts, {})
    return [
        (f.check, f.host, f.message, f.usual)
        for check in sharing_checks()
        for f in check.find(fleet)
    ]


def test_a_read_only_folder_is_unknown():
    found = judged(host("a", "/d", {}), host("b", "/d", {}))
    assert [(each[0], each[1]) for each in found] == [
        ("shared-folder", "a"),
        ("shared-folder", "b"),
    ]
    assert "unknown whether" in found[0][2]
    assert judged(host("a", "/d", {})) == []


def test_a_host_without_write_permission_shares_the_folder():
    sight: dict[str, dict[str, bool]] = {"a": {"b": True}, "b": {}, "c": {"b": True}}
    assert judged(*(host(name, "/d", seen) for name, seen in sight.items())) == []
