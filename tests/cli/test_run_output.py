import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S

from ronde.launch import Attempt, Output, Stream
from ronde.render import FILE_PROGRESS_S, SCREEN_PROGRESS_S, Console


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-S", "-c", code]


def test_each_line_says_its_rank_and_keeps_its_stream(ronde):
    program = "echo out $RANK; echo err $RANK >&2"
    done = ronde("run", "-n", "3", "--", "/bin/sh", "-c", program)
    assert sorted(done.stdout.splitlines()) == [
        b"[%d] out %d" % (r, r) for r in range(3)
    ]
    assert sorted(done.stderr.splitlines()) == [
        b"[%d] err %d" % (r, r) for r in range(3)
    ]


READ = ("run", "-n", "2", "--", "/bin/sh", "-c", "read line; echo got $line.")


def test_rank_0_reads_what_the_launcher_is_given(ronde):
    given, giving = os.pipe()
    os.write(giving, b"a line\n")
    os.close(giving)
    with os.fdopen(given) as file:
        done = ronde(*READ, stdin=file)
    assert sorted(done.stdout.splitlines()) == [b"[0] got a line.", b"[1] got ."]


@pytest.mark.parametrize(("job", "line"), [("", b"typed"), ("&", b"")])
def test_rank_0_reads_from_a_terminal_in_its_foreground(ronde, job, line):
    terminal, side = pty.openpty()
    os.write(terminal, b"typed\n")
    # A shell with jobs; what it starts in the background has a process group.
    shell = ["/bin/sh", "-mc", f'"$@" {job or ";"} wait', "sh", *ronde.command(*READ)]
    lead = {"stdin": side, "stdout": subprocess.PIPE, "preexec_fn": lead_session}
    try:
        with subprocess.Popen(shell, env=clean_environment(), **lead) as process:
            shown, _ = process.communicate(timeout=HANG_S)
    finally:
        os.close(terminal)
        os.close(side)
    assert sorted(shown.splitlines()) == [b"[0] got %s." % line, b"[1] got ."]


def lead_session() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


FLOOD = """
import os, sys
rank = int(os.environ["RANK"])
# In pieces that fit no line, so that every write ends inside of one.
text = b"".join(b"%d:%d:" % (rank, i) + b"x" * (i % 300) + b"\\n" for i in range(40000))
for start in range(0, len(text), 7001):
    os.write(1, text[start : start + 7001])
"""


def test_a_flood_of_all_ranks_comes_out_whole_and_in_order(ronde):
    done = ronde("run", "-n", "3", *python(FLOOD))
    assert done.returncode == 0
    for rank in range(3):
        mine = [li for li in done.stdout.split(b"\n") if li.startswith(b"[%d] " % rank)]
        expected = [
            b"[%d] %d:%d:" % (rank, rank, i) + b"x" * (i % 300) for i in range(40000)
        ]
        assert mine == expected
    assert done.stdout.count(b"\n") == 3 * 40000


BOTH = """
import os
for i in range(3000):
    os.write(1 + i % 2, b"%d:" % i + b"x" * 500 + b"\\n")
"""


def test_two_streams_in_one_pipe_do_not_cut_each_others_lines(ronde):
    done = ronde("run", "-n", "2", *python(BOTH), stderr=subprocess.STDOUT)
    expected = [
        b"[%d] %d:" % (r, i) + b"x" * 500 for r in range(2) for i in range(3000)
    ]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_a_progress_bar_on_a_file_says_something_each_ten_seconds(tmp_path):
    with (tmp_path / "out").open("wb") as file:
        console = Console(file.fileno(), file.fileno())
        console.begin(Attempt("job", 0, ("here",) * 5))
        for second in range(25):
            bar = Output(4, Stream.STDOUT, b"\r%d%%" % second)
            console.output(bar, float(second))
        assert console.tick(24.5) == pytest.approx(2 * FILE_PROGRESS_S + 10.0)
        while console.pending_fds:
            console.write_to(file.fileno())
    assert (tmp_path / "out").read_bytes() == b"[4] 10%\n[4] 20%\n"


def read_terminal(fd: int) -> bytes:
    """Read all that a program writes to a terminal until it hangs up."""
    said = b""
    ends_at = time.monotonic() + HANG_S
    while select.select([fd], [], [], max(0.0, ends_at - time.monotonic()))[0]:
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        if not data:
            break
        said += data
    return said


def test_a_progress_bar_on_a_terminal_is_redrawn_in_place(ronde):
    code = (
        "import sys\n"
        "sys.stderr.write('\\r 10%'); sys.stderr.flush()\n"
        "print('a line', flush=True)\n"
        "sys.stderr.write('\\r100%\\n')\n"
    )
    ours, theirs = pty.openpty()
    try:
        with ronde.start(
            "run", "-n", "1", *python(code), stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            said = read_terminal(ours).replace(b"\r\n", b"\n")
            assert process.wait(HANG_S) == 0
    finally:
        os.close(ours)
    # What is left on the screen when each erased piece is taken away.
    shown = re.sub(rb"[^\n]*\r\x1b\[J", b"", said)
    assert sorted(shown.splitlines()) == [b"[0] 100%", b"[0] a line"]


def test_bars_of_several_ranks_stand_below_the_lines():
    ours, theirs = pty.openpty()
    try:
        console = Console(theirs, theirs)
        console.begin(Attempt("job", 0, ("here",) * 3))
        console.output(Output(1, Stream.STDERR, b"\rone"), 0.0)
        console.output(Output(0, Stream.STDERR, b"\rzero"), 0.0)
        console.output(Output(0, Stream.STDERR, b"\rtoo soon"), SCREEN_PROGRESS_S / 2)
        console.output(Output(2, Stream.STDOUT, b"line\n"), SCREEN_PROGRESS_S / 2)
        console.write_to(theirs)
        said = os.read(ours, 65536).replace(b"\r\n", b"\n")
    finally:
        os.close(ours)
        os.close(theirs)
    first = b"[1] one" + b"\r\x1b[J" + b"[0] zero\n[1] one"
    second = b"\r\x1b[1A\x1b[J" + b"[2] line\n" + b"[0] zero\n[1] one"
    assert said == first + second


ENDLESS = "while True: print('x' * 1000, flush=True)"


def test_who_reads_no_more_ends_the_job(ronde):
    with ronde.start("run", "-n", "2", *python(ENDLESS)) as process:
        assert os.read(process.stdout.fileno(), 10)
        process.stdout.close()
        assert process.wait(HANG_S) == 141
        assert b"the reader of the output has gone" in process.stderr.read()


def test_a_reader_that_rests_does_not_hold_back_a_signal(ronde):
    ready = "import os, sys; os.write(2, b'ready\\n'); "
    with ronde.start("run", "-n", "1", *python(ready + "\n" + ENDLESS)) as process:
        assert process.stderr.readline() == b"[0] ready\n"
        # Nobody reads stdout: it fills up, whether before or after the signal.
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 143
        process.stdout.read()


FAILS_BEHIND_A_FLOOD = """
import os, sys, time
if os.environ["RANK"] == "0":
    os.write(2, b"%d\\n" % os.getpid())
    while True: os.write(1, b"x" * 999 + b"\\n")
"""


def test_a_reader_that_rests_does_not_hide_a_failure(ronde, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = f"""{FAILS_BEHIND_A_FLOOD}
open({str(gate)!r}).read()
sys.exit(5)
"""
    with ronde.start("run", "-n", "2", *python(program)) as process:
        flooding = int(process.stderr.readline().removeprefix(b"[0] "))
        process_fd = os.pidfd_open(flooding)
        try:
            gate.write_text("fail now")
            # Nobody has read a byte of stdout, and the flooding rank is ended.
            assert select.select([process_fd], [], [], HANG_S)[0]
        finally:
            os.close(process_fd)
        process.communicate(timeout=HANG_S)
        assert process.returncode == 5
