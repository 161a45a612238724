import json
import re

import pytest

from ronde.errors import UsageError
from ronde.launch import Attempt, Output, Stream
from ronde.render import Console, Tag, TagStyle, parse_ranks, parse_tag

HOSTS = ("node1", "node1", "node2", "node2")


def shell(program):
    return ["--", "/bin/sh", "-c", program]


def shown(path, outputs, **options):
    """Return what a console shows of a job on two hosts."""
    with path.open("wb") as file:
        console = Console(file.fileno(), file.fileno(), **options)
        console.begin(Attempt("job", 0, HOSTS))
        for output in outputs:
            console.output(output, 0.0)
        console.tick(100.0)
        console.output(Output(3, Stream.STDOUT, b"end\n"), 100.0)
        while console.pending_fds:
            console.write_to(file.fileno())
    return path.read_bytes().splitlines()


SAID = [
    Output(0, Stream.STDOUT, b"a\nb\n"),
    Output(2, Stream.STDERR, b"c\n"),
    Output(3, Stream.STDOUT, b"half "),
]


@pytest.mark.parametrize(
    ("tag", "places"),
    [
        ("auto", ["[node1:0] ", "[node2:2] ", "[node2:3] ", "[node2:3]+"]),
        ("host", ["[node1:0] ", "[node2:2] ", "[node2:3] ", "[node2:3]+"]),
        ("rank", ["[0] ", "[2] ", "[3] ", "[3]+"]),
        ("none", ["", "", "", ""]),
    ],
)
def test_a_tag_says_as_much_as_is_asked_for(tmp_path, tag, places):
    zero, two, three, more = (place.encode() for place in places)
    lines = [zero + b"a", zero + b"b", two + b"c", three + b"half ", more + b"end"]
    assert shown(tmp_path / "out", SAID, tag=parse_tag(tag)) == lines
    timed = shown(tmp_path / "timed", SAID, tag=parse_tag(f"{tag},time"))
    clock = rb"\d\d:\d\d:\d\d\.\d{3}"
    for line, said in zip(timed, lines, strict=True):
        blank = rb"[ +]" if tag == "none" else b" "
        assert re.fullmatch(clock + blank + re.escape(said), line), line


@pytest.mark.parametrize("text", ["", "hosts", "host,rank", "time,time", "host,"])
def test_other_tags_are_refused(text):
    with pytest.raises(UsageError, match=r"^--tag must be rank, host, none or time"):
        parse_tag(text)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", {0}),
        ("0-2", {0, 1, 2}),
        ("0-3:2", {0, 2}),
        ("3,1-1,0-0:5", {0, 1, 3}),
        (" 1 , 2 ", {1, 2}),
    ],
)
def test_ranks_to_show(text, ranks):
    assert parse_ranks(text, "--only").among(HOSTS) == ranks


def test_local_ranks_count_on_each_host():
    chosen = parse_ranks("1", "--local-ranks-filter", is_local=True)
    assert chosen.among(HOSTS) == {1, 3}
    with pytest.raises(UsageError, match=r"must name ranks in 0\.\.1, got 2\."):
        parse_ranks("0,2", "--local-ranks-filter", is_local=True).among(HOSTS)


def test_another_generation_begins_with_nothing_of_the_one_before(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        console = Console(file.fileno(), file.fileno(), tag=Tag(TagStyle.RANK))
        for epoch in range(2):
            console.begin(Attempt("job", epoch, HOSTS))
            console.output(Output(0, Stream.STDOUT, b"cut "), 0.0)
            console.tick(100.0)
            console.begin(Attempt("job", epoch + 1, HOSTS))
            console.output(Output(0, Stream.STDOUT, b"new\n"), 100.0)
        while console.pending_fds:
            console.write_to(file.fileno())
    assert (tmp_path / "out").read_bytes() == b"[0] cut \n[0] new\n" * 2


def test_only_and_tag_are_checked_before_anything_starts(ronde_here, tmp_path):
    touch = shell(f"touch {tmp_path}/started")
    for words in (("--only", "5"), ("--only", "x"), ("--tag", "x")):
        done = ronde_here("run", "-n", "2", *words, *touch)
        assert done.returncode == 64, done
        assert done.stderr.startswith(b"ronde: " + words[0].encode() + b" must ")
    assert not (tmp_path / "started").exists()


def test_the_error_file_says_why_nothing_was_started(ronde, tmp_path):
    path = tmp_path / "error.json"
    done = ronde("run", "-n", "1", "--error-file", str(path), "--", "./none")
    report = json.loads(path.read_text())
    assert done.returncode == report["exit_code"] == 64
    assert done.stderr.decode().startswith(f"ronde: {report['message']}")
    assert report["verdict"] is None
