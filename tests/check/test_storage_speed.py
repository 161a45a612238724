"""How fast folders are: who writes when, what that tells, and that nothing stays."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.check.programs import panel_of as panel_of_programs

from ronde.check import path_tasks
from ronde.check.catalogue import all_checks
from ronde.check.check import Severity
from ronde.check.facts import Fleet, HostFacts, Value
from ronde.check.hosts import HostSet, NodeContext
from ronde.check.judging import judge
from ronde.check.storage import sharing, speed as operations, speed as storing
from ronde.check.storage.speed import LEFT, SPEED
from ronde.launch.running import Answer

CHECKS = tuple(each for each in all_checks() if each.id == "storage-speed")

SITE = NodeContext({}, ExitStack())
LIMIT_S = 60.0


def question(path: Path, **changes: Value) -> dict[str, Value]:
    return {
        "path": str(path),
        "name": ".ronde-check-0",
        "num_bytes": 3 << 20,
        "num_files": 20,
        "patience_s": LIMIT_S,
        "deadline_s": LIMIT_S,
    } | changes


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    told = operations.fill_folder(SITE, question(tmp_path))
    assert told.pop("is_cleared") is True
    assert told["num_files"] == 20
    assert set(told) == {"write_s", "num_files", "files_s"}
    assert told["write_s"] > 0 < told["files_s"]
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_all_bytes_and_files_are_there_when_they_are_timed(tmp_path: Path) -> None:
    """The seconds are those of what was asked for."""
    data = memoryview(os.urandom((3 << 20) + 5))
    path_tasks._write_new(f"{tmp_path}/data", data, is_flushed=True)
    assert (tmp_path / "data").read_bytes() == data
    assert path_tasks._time_small_files(str(tmp_path), 7, LIMIT_S)[0] == 7
    assert path_tasks._time_small_files(str(tmp_path), 7, 0.0)[0] == 0


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_no_folder_says_why(tmp_path: Path, *, is_file: bool) -> None:
    target = tmp_path / "target"
    if is_file:
        target.touch()
    told = operations.fill_folder(SITE, question(target))
    why = "Not a directory" if is_file else "No such file or directory"
    assert (told["error"], target.exists()) == (why, is_file)


def test_what_would_fill_the_disk_is_not_begun(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    free = room.f_bavail * room.f_frsize
    changed_ns = tmp_path.stat().st_mtime_ns
    told = operations.fill_folder(SITE, question(tmp_path, num_bytes=free))
    assert "MiB free, and " in told["error"]
    assert tmp_path.stat().st_mtime_ns == changed_ns


def test_where_files_cannot_be_made_none_are(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    wanted = room.f_favail // 2 + 1
    free = room.f_bavail * room.f_frsize
    if (
        not room.f_files
        or wanted * path_tasks.SMALL_BYTES + path_tasks.SPARE_BYTES > free
    ):
        pytest.skip("here the number of files is limited by nothing, or by their sizes")
    told = operations.fill_folder(SITE, question(tmp_path, num_files=wanted))
    assert "more files, not" in told["error"]


def test_what_is_killed_at_its_deadline_leaves_nothing(tmp_path: Path) -> None:
    told = operations.fill_folder(SITE, question(tmp_path, deadline_s=0.0))
    assert told["has_hung"] is True
    assert told["is_cleared"] is True
    assert list(tmp_path.iterdir()) == []


def test_what_was_killed_in_between_is_taken_away(tmp_path: Path) -> None:
    """Its process is gone, with all it would have done at its end."""
    endless = question(tmp_path, num_bytes=1 << 20, num_files=2000)
    del endless["deadline_s"]
    program = "import json, sys; from ronde.check import path_tasks; "
    program += "path_tasks._time_small_files = lambda *_: sys.stdin.read(); "
    program += "path_tasks.fill(**json.loads(sys.argv[1]))"
    with subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(endless)], stdin=subprocess.PIPE
    ) as process:
        data = tmp_path / ".ronde-check-0" / "data"
        wait_for(data.exists)
        process.kill()
    assert data.exists()
    ours = {"path": str(tmp_path), "names": [".ronde-check-0", ".ronde-check-1"]}
    assert operations.clear_folders(SITE, ours) == {"found": [".ronde-check-0"]}
    assert list(tmp_path.iterdir()) == []


def wait_for(is_done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Many folders, so that it comes long before the last of them."""
    folders = [tmp_path / str(number) for number in range(12)]
    words = [sys.executable, "-m", "ronde", "check", "--storage-speed"]
    for folder in folders:
        folder.mkdir()
        words += ["--path", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: any(folders[0].iterdir()))
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    assert [*tmp_path.glob("*/*"), *tmp_path.glob("*/.*")] == []


def test_hosts_measure_what_they_share(tmp_path: Path) -> None:
    """Three real programs, as on hosts that share a disk."""
    settings = {"paths": [str(tmp_path)], "storage_speed": True}
    names = dict.fromkeys(("a", "b", "c"), "")
    with panel_of_programs(names, settings) as panel:
        sharing.run(panel)
        storing.run(panel)
    for facts in panel.facts.values():
        assert facts.unreadable == {}
        told = facts.values[SPEED][str(tmp_path)]
        assert told["mb_per_s"] > 0 < told["files_per_s"]
    assert list(tmp_path.iterdir()) == []


QUICK = {"write_s": 0.5, "num_files": 1000, "files_s": 0.1, "is_cleared": True}
SLOW = {"write_s": 5.0, "num_files": 1000, "files_s": 0.1, "is_cleared": True}


class Hosts:
    """Hosts that answer as they are told to; it is written down who was asked when."""

    def __init__(self, **answers: list[dict[str, Value]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, list[str]]] = []
        self.names: dict[str, str] = {}
        self.shared: dict[str, set[str]] = {}
        self.gone: set[str] = set()

    def ask(self, questions: Mapping[str, str], timeout_s: float) -> dict[str, Answer]:
        asked = {host: json.loads(line) for host, line in questions.items()}
        (do,) = {each["do"] for each in asked.values()}
        if do == "clock":
            here, gone = Answer('{"now": 0}', ""), Answer("", "it is gone")
            return {host: gone if host in self.gone else here for host in asked}
        self.asked.append((do, list(asked)))
        return {
            host: Answer(json.dumps(getattr(self, do)(host, each)), "")
            for host, each in asked.items()
        }

    def fill_folder(self, host: str, asked: dict[str, Value]) -> dict[str, Value]:
        self.names[asked["name"]] = host
        told, *later = self.answers[host]
        self.answers[host] = later or [told]
        return dict(told)

    def clear_folders(self, host: str, asked: dict[str, Value]) -> dict[str, Value]:
        if "is_cleared" not in self.answers[host][0]:
            return {"error": "it is gone"}
        seen = self.shared.get(host, set())
        return {"found": [n for n in asked["names"] if self.names[n] in seen]}


def run(
    hosts: Hosts,
    *,
    groups: tuple[tuple[str, ...], ...] = (),
    hung: tuple[str, ...] = (),
    paths: tuple[str, ...] = ("/d",),
) -> HostSet:
    settings: dict[str, Value] = {"paths": paths, "storage_speed": True}
    panel = HostSet(hosts, dict.fromkeys(hosts.answers, ""), settings)  # type: ignore[arg-type]
    for name in hosts.answers:
        own = next((each for each in groups if name in each), (name,))
        seen = {other: other in own for other in hosts.answers if other != name}
        panel.note(name, sharing.SHARED, {"/d": seen})
        panel.note(name, "storage.hung", ["/d"] if name in hung else [])
    storing.run(panel)
    return panel


def test_hosts_that_share_a_folder_write_one_after_the_other() -> None:
    hosts = Hosts(**{name: [QUICK] for name in "abcde"})
    run(hosts, groups=(("a", "c", "d"),))
    assert hosts.asked == [
        ("fill_folder", ["a", "b", "e"]),
        ("fill_folder", ["c"]),
        ("fill_folder", ["d"]),
    ]


def test_many_hosts_do_not_take_for_ever() -> None:
    names = tuple(f"n{number}" for number in range(100))
    hosts = Hosts(**{name: [QUICK] for name in names})
    run(hosts, groups=(names,))
    assert len(hosts.asked) <= storing.MAX_ROUNDS
    assert [name for _, asked in hosts.asked for name in asked] == list(names)


def test_no_two_folders_have_one_name() -> None:
    hosts = Hosts(**{name: [QUICK] for name in "abc"})
    run(hosts, groups=(("a", "b", "c"),))
    assert sorted(hosts.names.values()) == ["a", "b", "c"]
    assert all(len(name) > len(".ronde-check-") + 16 for name in hosts.names)


def test_who_is_slow_by_chance_is_measured_again() -> None:
    hosts = Hosts(a=[QUICK], b=[SLOW, QUICK], c=[QUICK])
    panel = run(hosts)
    assert hosts.asked[1:] == [("fill_folder", ["b"])]
    assert findings_of(panel) == []


def test_who_is_slow_twice_is_named() -> None:
    panel = run(Hosts(a=[QUICK], b=[SLOW], c=[QUICK]))
    assert findings_of(panel) == [
        ("storage-speed", "b", "/d takes 13.4 MB/s", "134 MB/s on most hosts")
    ]


def test_what_hangs_in_the_probe_is_not_waited_for_again() -> None:
    hosts = Hosts(a=[QUICK], b=[QUICK])
    panel = run(hosts, hung=("b",))
    assert hosts.asked == [("fill_folder", ["a"])]
    assert panel.facts["b"].unreadable == {SPEED: "/d: it does not answer"}


def test_what_hangs_while_it_is_written_to_is_a_failure() -> None:
    lost = {"error": "no answer", "has_hung": True, "is_cleared": True}
    panel = run(Hosts(a=[QUICK], b=[lost], c=[QUICK]))
    what = "/d does not take 64MiB and 1000 small files within 30 s"
    assert findings_of(panel) == [("storage-speed", "b", what, "")]


def test_what_cannot_be_written_to_is_unreadable() -> None:
    refused = {"error": "Read-only file system", "is_cleared": True}
    panel = run(Hosts(a=[QUICK], b=[refused], c=[QUICK]))
    judgement = judge(fleet_of(panel), CHECKS)
    assert judgement.findings == ()
    assert {(each.check, each.host, each.reason) for each in judgement.unread} == {
        (check.id, "b", "/d: Read-only file system") for check in CHECKS
    }


def test_one_of_two_folders_that_cannot_be_written_to_is_told() -> None:
    refused = {"error": "Read-only file system", "is_cleared": True}
    panel = run(Hosts(a=[QUICK, refused]), paths=("/d", "/e"))
    (finding,) = judge(fleet_of(panel), CHECKS).findings
    assert finding.severity is Severity.INFORM
    assert finding.what == "/e was not measured: Read-only file system"


def test_what_a_lost_host_has_left_is_taken_away_by_others() -> None:
    lost: list[dict[str, Value]] = [{"error": "it is gone"}]
    hosts = Hosts(a=[QUICK], b=lost, c=[QUICK])
    hosts.shared = {"c": {"b"}}
    panel = run(hosts)
    assert hosts.asked[1:] == [("clear_folders", ["b"]), ("clear_folders", ["a", "c"])]
    assert findings_of(panel) == []


def test_what_may_be_left_is_told_with_what_removes_it() -> None:
    panel = run(Hosts(a=[QUICK], b=[{"error": "it is gone"}], c=[QUICK]))
    (folder,) = panel.facts["b"].values[LEFT]
    assert folder.startswith("/d/.ronde-check-")
    (finding,) = judge(fleet_of(panel), CHECKS).findings
    assert (finding.host, finding.fix) == ("b", f"rm -r {folder}")


def test_a_host_that_was_gone_before_has_left_nothing() -> None:
    hosts = Hosts(a=[QUICK], b=[QUICK], c=[QUICK])
    hosts.gone = {"b"}
    panel = run(hosts)
    assert hosts.asked == [("fill_folder", ["a", "c"])]
    assert panel.facts["b"].unreadable == {SPEED: "/d: it is gone"}
    assert LEFT not in panel.facts["b"].values


def test_an_end_in_between_is_cleaned_up_after() -> None:
    class Ended(Exception):  # noqa: N818
        pass

    class Ending(Hosts):
        def fill_folder(self, host: str, asked: dict[str, Value]) -> dict[str, Value]:
            super().fill_folder(host, asked)
            raise Ended

    hosts = Ending(a=[QUICK])
    with pytest.raises(Ended):
        run(hosts)
    assert hosts.asked == [("fill_folder", ["a"]), ("clear_folders", ["a"])]


def test_without_a_folder_it_says_so() -> None:
    panel = run(Hosts(a=[QUICK]), paths=())
    assert "--path" in panel.facts["a"].unreadable[SPEED]


def fleet_of(panel: HostSet) -> Fleet:
    return Fleet(tuple(panel.facts.values()), {})


def findings_of(panel: HostSet) -> list[tuple[str, str, str, str]]:
    found = judge(fleet_of(panel), CHECKS).findings
    return [(f.check, f.host, f.what, f.usual) for f in found]


def judged(*speeds: tuple[float, float]) -> list[tuple[str, str, Severity]]:
    hosts: list[HostFacts] = []
    for number, (mb_per_s, files_per_s) in enumerate(speeds):
        told: dict[str, Any] = {"mb_per_s": mb_per_s, "files_per_s": files_per_s}
        hosts.append(HostFacts(f"n{number}", {SPEED: {"/d": told}}, {}, {}))
    found = judge(Fleet(tuple(hosts), {}), CHECKS).findings
    return [(each.check, each.host, each.severity) for each in found]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([(30, 50)], []),
        ([(29.9, 50)], ["storage-speed n0"]),
        ([(30, 49)], ["storage-speed n0"]),
        ([(100, 100), (50, 50), (100, 100)], []),
        ([(100, 100), (49, 100), (100, 100)], ["storage-speed n1"]),
        ([(100, 200), (100, 99), (100, 200)], ["storage-speed n1"]),
        # Of two nobody is to blame, and both are told.
        ([(100, 100), (49, 100)], ["storage-speed n0", "storage-speed n1"]),
        # All are slow.
        ([(9, 99)] * 3, ["storage-speed n0", "storage-speed n1", "storage-speed n2"]),
        ([(500, 5000), (100, 2000), (100, 2000)], []),
    ],
)
def test_speeds_are_judged(
    speeds: list[tuple[float, float]], expected: list[str]
) -> None:
    found = judged(*speeds)
    assert [f"{check} {host}" for check, host, _ in found] == expected
    assert {severity for _, _, severity in found} <= {Severity.WARN}
