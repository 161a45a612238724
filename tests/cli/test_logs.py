import json
import resource
import stat
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.launch import (
    Attempt,
    ErrorFile,
    LostHost,
    Output,
    RankEnd,
    RankLogs,
    Stream,
    judge,
)

HOSTS = ("a", "a", "b")


class Heard:
    """A sink that keeps the notices of the files."""

    def __init__(self):
        self.told = []

    def notice(self, text):
        self.told.append(text)


@pytest.fixture
def heard():
    return Heard()


def generation(epoch=0, hosts=HOSTS):
    return Attempt("job", epoch, hosts)


def end(rank, status, *, was_stopped=False):
    return RankEnd(rank, HOSTS[rank], 100 + rank, status, 1.5, was_stopped)


def out(rank, data, stream=Stream.STDOUT):
    return Output(rank, stream, data)


def read(directory, rank, stream="stdout"):
    return (directory / str(rank) / f"{stream}.log").read_bytes()


def names(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def modes(directory):
    return {stat.S_IMODE(p.stat().st_mode) for p in [directory, *directory.rglob("*")]}


@given(
    st.lists(st.builds(Output, st.integers(0, 2), st.sampled_from(Stream), st.binary()))
)
def test_files_have_each_streams_bytes_in_order(tmp_path_factory, said):
    heard, directory = Heard(), tmp_path_factory.mktemp("logs")
    logs = RankLogs(heard, str(directory))
    logs.begin(generation())
    for output in said:
        logs.output(output)
    logs.finished(judge([]))
    for rank in range(3):
        for stream in Stream:
            expected = b"".join(
                o.data for o in said if (o.worker, o.stream) == (rank, stream)
            )
            name = stream.name.lower()
            assert read(directory / "job/attempt_0", rank, name) == expected


def test_only_the_user_can_read_them(heard, tmp_path):
    logs = RankLogs(heard, str(tmp_path / "new" / "logs"))
    logs.begin(generation())
    logs.output(out(1, b"secret"))
    logs.finished(judge([end(0, 1)]))
    assert modes(tmp_path / "new/logs/job") == {0o700, 0o600}


def test_the_index_says_whose_they_are_and_how_it_ended(heard, tmp_path):
    logs = RankLogs(heard, str(tmp_path))
    logs.begin(generation(1))
    path = tmp_path / "job/attempt_1/index.json"
    before = json.loads(path.read_text())
    assert (before["job_id"], before["epoch"]) == ("job", 1)
    assert [r["host"] for r in before["ranks"]] == list(HOSTS)
    for entry in before["ranks"]:
        assert (path.parent / entry["stdout"]).read_bytes() == b""
        assert (path.parent / entry["stderr"]).read_bytes() == b""
    lost = LostHost("b", (2,), "gone", 69, 3.0)
    logs.finished(judge([end(0, -11), end(1, 0)], lost=[lost]))
    after = json.loads((path.parent / "end.json").read_text())
    assert (after["job_id"], after["epoch"]) == ("job", 1)
    assert after["verdict"]["exit_code"] == 139
    assert after["verdict"]["cause"]["signal"] == "SIGSEGV"
    assert after["verdict"]["also_lost"][0]["ranks"] == [2]
    assert names(path.parent) == ["0", "1", "2", "end.json", "index.json"]


def test_nothing_that_is_there_is_overwritten_or_followed(heard, tmp_path):
    logs = RankLogs(heard, str(tmp_path))
    logs.begin(generation())
    with pytest.raises(UsageError, match="cannot write to --log-dir"):
        RankLogs(heard, str(tmp_path)).begin(generation())
    aim = tmp_path / "aim"
    aim.touch()
    log = tmp_path / "job/attempt_0/0/stdout.log"
    log.unlink()
    log.symlink_to(aim)
    logs.output(out(0, b"into the aim"))
    assert aim.read_bytes() == b""
    assert "cannot be written" in heard.told[0]


def test_more_ranks_than_files_may_be_open(heard, tmp_path):
    num_ranks = 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    logs = RankLogs(heard, str(tmp_path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        logs.begin(generation(hosts=("h",) * num_ranks))
        for number in range(3):
            for rank in range(num_ranks):
                logs.output(out(rank, b"%d %d\n" % (rank, number)))
                logs.output(out(rank, b"%d\n" % number, Stream.STDERR))
        logs.finished(judge([]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [told for told in heard.told if isinstance(told, str)] == []
    for rank in range(num_ranks):
        expected = b"".join(b"%d %d\n" % (rank, n) for n in range(3))
        assert read(tmp_path / "job/attempt_0", rank) == expected
        assert read(tmp_path / "job/attempt_0", rank, "stderr") == b"0\n1\n2\n"


def test_a_file_that_takes_nothing_more_stops_no_other(heard, tmp_path):
    limit, piece = 10_000, b"x" * 999 + b"\n"
    logs = RankLogs(heard, str(tmp_path))
    logs.begin(generation())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit - 500, hard))
    try:
        for _ in range(limit // len(piece) + 3):
            logs.output(out(0, piece))
            logs.output(out(0, b"kept\n", Stream.STDERR))
            logs.output(out(1, b"kept\n"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logs.output(out(0, b"more"))
    logs.finished(judge([end(0, 1)]))
    told = [each for each in heard.told if isinstance(each, str)]
    reason = "cannot be written (File too large); it is shown here only"
    assert told == [f"stdout.log of rank 0 {reason}"]
    assert read(tmp_path / "job/attempt_0", 0) == (piece * 10)[: limit - 500]
    assert read(tmp_path / "job/attempt_0", 0, "stderr") == b"kept\n" * 13
    assert read(tmp_path / "job/attempt_0", 1) == b"kept\n" * 13


def test_the_error_file_tells_the_last_end(heard, tmp_path):
    path = tmp_path / "error.json"
    path.write_text("old")
    sink = ErrorFile(heard, str(path))
    sink.begin(generation())
    assert path.read_text() == "old"
    ends = [
        RankEnd(0, "a", 7, 1, 1.0, False, ("E: \udcff",), "Traceback\nE: ä", "why"),
        RankEnd(1, "a", 8, -15, 1.0, True),
    ]
    sink.finished(judge(ends))
    report = json.loads(path.read_text())
    assert {k: v for k, v in report.items() if k != "verdict"} == {
        "schema": 1,
        "job_id": "job",
        "epoch": 0,
        "exit_code": 1,
        "message": "",
    }
    assert report["verdict"]["cause"] == {
        "kind": "rank",
        "rank": 0,
        "host": "a",
        "pid": 7,
        "exit_code": 1,
        "signal": None,
        "at_s": 1.0,
        "was_stopped": False,
        "evidence": "why",
        "lost_its_peer": False,
        "traceback": "Traceback\nE: ä",
        "stderr_tail": ["E: \udcff"],
    }
    assert [e["signal"] for e in report["verdict"]["ended"]] == ["SIGTERM"]
    sink.begin(generation(1))
    sink.finished(judge([end(0, 0)]))
    assert json.loads(path.read_text())["verdict"]["cause"] is None
    assert modes(path) == {0o600}
    assert names(tmp_path) == ["error.json"]
