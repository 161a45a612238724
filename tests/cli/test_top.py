"""``ronde top`` and ``ronde run --top`` on real jobs, in a terminal and without one."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.cli.conftest import Ronde
from tests.cli.test_ps import running
from tests.limits import HANG_S, until

from ronde.launch import Attempt, Output, Stream, find_sockets, watch
from ronde.processes import descendants, read_text
from ronde.render import Console

pytestmark = pytest.mark.waits

COUNT = """
import itertools, pathlib, sys, time
import ronde
for step in itertools.count():
    print("line", step, flush=True)
    ronde.progress(step=step, loss=1.5, tokens=10)
    time.sleep(0.02)
    if pathlib.Path(sys.argv[1]).exists():
        sys.exit(5)
"""
PIECES = re.compile(rb"\x1b\[(\d*)([AJ])|\r|\n|[^\r\n\x1b]+")


class Terminal:
    """A terminal with the lines that a program has shown."""

    def __init__(self):
        self.fd, self.side = pty.openpty()
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(self.side)
        self.shown = b""

    def read_until(self, words):
        while words not in self.shown:
            data = os.read(self.fd, 65536)
            assert data, self.shown
            self.shown += data

    def read_rest(self, process):
        os.close(self.side)
        while True:
            try:
                data = os.read(self.fd, 65536)
            except OSError:  # no process has it open
                break
            self.shown += data
        process.wait(HANG_S)

    def lines(self):
        """Return the lines that ``ronde run`` leaves on the terminal."""
        lines, row, column = [b""], 0, 0
        for found in PIECES.finditer(self.shown):
            piece = found[0]
            if piece == b"\r":
                column = 0
            elif piece == b"\n":
                row += 1
                lines += [b""] * (row == len(lines))
            elif found[2] == b"A":
                row -= int(found[1] or 1)
            elif found[2] == b"J":
                lines[row:] = [lines[row][:column]]
            else:
                line, end = lines[row].ljust(column), column + len(piece)
                lines[row], column = line[:column] + piece + line[end:], end
        return lines


@contextmanager
def shown(ronde, *words, **popen):
    """Start the command in a terminal that it leads."""
    terminal = Terminal()

    def lead_session():
        os.setsid()
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.side)
    env = {"TERM": "xterm-256color"}
    try:
        with ronde.start(
            *words, env=env, preexec_fn=lead_session, **streams, **popen
        ) as process:
            try:
                yield process, terminal
            finally:
                process.kill()
    finally:
        os.close(terminal.fd)


def counting(tmp_path):
    return sys.executable, "-c", COUNT, str(tmp_path / "end")


def check_served(ronde, name, metrics):
    """Read a job's page and metrics; SIGTERM ends both, and removes the file."""
    with ronde.start("top", name, "--web", "--prometheus", str(metrics)) as top:
        try:
            url = urlsplit(top.stdout.readline().decode().strip())
            server = HTTPConnection(url.netloc, timeout=HANG_S)
            with closing(server):
                server.request("GET", f"/?{url.query}")
                assert b"ronde top" in server.getresponse().read()
            until(metrics.exists)
            assert "ronde_step{" in metrics.read_text()
            top.terminate()
            assert top.wait(HANG_S) == 143
        finally:
            top.kill()
    assert not metrics.exists()


def test_a_job_is_shown_once_as_text_and_as_json(ronde, ronde_here, tmp_path):
    words = ("-n", "2", "--", *counting(tmp_path))
    with running(ronde, *words) as (process, path):
        name = str(tmp_path)
        for options in ((), ("--once",)):
            text = ronde_here("top", name, *options).stdout.decode()
            assert "2 ranks on" in text
            assert "loss 1.5" in text
            assert "tokens/s" in text
            assert "C compute" in text
            assert "\x1b" not in text
            assert max(map(len, text.splitlines())) <= 80
        view = json.loads(ronde_here("top", name, "--json").stdout)
        assert view["job"]["head_pid"] == process.pid
        assert view["loss"] == 1.5
        assert sorted(rank["rank"] for rank in view["ranks"]) == [0, 1]
        check_served(ronde, name, tmp_path / "job.prom")
        without = "import sys; sys.modules['textual'] = None; import ronde.cli as c;"
        old = Ronde((sys.executable, "-c", f"{without} c.main()"))
        assert b"2 ranks on" in old("top", name, "--once").stdout
        with shown(old, "top", name) as (top, terminal):
            terminal.read_rest(top)
            assert b"needs textual. Type: pip install" in terminal.shown
            assert top.returncode == 64
        with running(ronde, "-n", "1", "/bin/sleep", "1000"):
            several = ronde_here("top")
            assert several.returncode == 64
            assert b"several jobs are running, so JOB must be given" in several.stderr
            other = ronde_here("top", "no such job")
            assert b"JOB must be one of" in other.stderr
        (tmp_path / "end").touch()
        assert process.wait(HANG_S) == 5
    assert path not in find_sockets()


def test_the_live_view_ends_with_a_key_or_a_signal_and_the_job_goes_on(ronde, tmp_path):
    words = ("-n", "2", "--", *counting(tmp_path))
    with running(ronde, *words) as (process, path):
        name = str(tmp_path)
        with shown(ronde, "top", name) as (top, terminal):
            terminal.read_until(b"tokens/s")
            top.kill()
            terminal.read_rest(top)
        version = next(watch(path)).version
        until(lambda: next(watch(path)).version > version)
        for end in (signal.SIGTERM, "the job"):
            with shown(ronde, "top", name) as (top, terminal):
                terminal.read_until(b"tokens/s")
                if end == "the job":
                    (tmp_path / "end").touch()
                    assert process.wait(HANG_S) == 5
                    terminal.read_until(b"The job is over")
                    os.write(terminal.fd, b"q")
                else:
                    assert process.poll() is None
                    top.send_signal(end)
                terminal.read_rest(top)
                assert top.returncode == 0
            _, left, after = terminal.shown.rpartition(b"\x1b[?1049l")
            assert left
            # The last view stays as text.
            assert b"2 ranks on" in after
            assert (b"exit code 5" in after) == (end == "the job")


def find_display(process):
    """Return the pid of the program that makes the view of ``ronde run --top``."""
    found = [
        each.pid
        for each in descendants(process.pid)
        if "ronde.cli.top" in read_text(f"/proc/{each.pid}/cmdline")
    ]
    return found[0] if found else 0


def test_a_view_below_the_output_loses_no_line_and_may_be_killed(ronde, tmp_path):
    words = ("run", "--top", "-n", "2", "--", *counting(tmp_path))
    with shown(ronde, *words) as (process, terminal):
        terminal.read_until(b"tokens/s")
        os.kill(find_display(process), signal.SIGKILL)
        # The last view becomes a part of the output.
        newest = max(map(int, re.findall(rb"line (\d+)", terminal.shown)))
        terminal.read_until(b"line %d\r\n" % (newest + 50))
        (tmp_path / "end").touch()
        settings = termios.tcgetattr(terminal.side)
        terminal.read_rest(process)
        assert process.returncode == 5
    assert settings == terminal.settings
    lines = terminal.lines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(b"[%d] line " % rank)]
        assert own == [b"[%d] line %d" % (rank, n) for n in range(len(own))]
        assert len(own) > 10
    assert sum(b"C compute" in line for line in lines) == 1


def test_a_key_ends_a_job_with_a_view(ronde, tmp_path):
    words = ("run", "--top", "-n", "2", "--", *counting(tmp_path))
    with shown(ronde, *words) as (process, terminal):
        terminal.read_until(b"tokens/s")
        display = find_display(process)
        os.write(terminal.fd, b"\x03")
        terminal.read_rest(process)
        assert process.returncode == 130
    until(lambda: not Path(f"/proc/{display}").exists())
    assert sum(b"C compute" in line for line in terminal.lines()) == 1


def test_a_view_stands_below_bars_and_its_last_state_stays():
    terminal = Terminal()
    console = Console(terminal.side, terminal.side)
    console.begin(Attempt("job", 0, ("here",)))

    def lines():
        console.write_to(terminal.side)
        terminal.shown += os.read(terminal.fd, 65536)
        return terminal.lines()

    console.live_view(["----", "one"])
    console.output(Output(0, Stream.STDERR, b"\rbar"), 0.0)
    console.output(Output(0, Stream.STDOUT, b"line\n"), 0.0)
    assert lines() == [b"[0] line", b"[0] bar", b"----", b"one"]
    console.live_view(["----", "x" * 100])
    assert lines() == [b"[0] line", b"[0] bar", b"----", b"x" * 79]
    console.live_view([f"{n}" for n in range(100)])
    assert len(lines()) <= 24
    console.live_view(["----", "two"])
    console.live_view([])
    assert lines() == [b"[0] line", b"----", b"two", b"[0] bar"]
    console.output(Output(0, Stream.STDERR, b"\rbar\n"), 1.0)
    assert lines() == [b"[0] line", b"----", b"two", b"[0] bar", b""]
    os.close(terminal.fd)
    os.close(terminal.side)


def test_without_a_terminal_there_is_no_view(ronde):
    done = ronde("run", "--top", "-n", "1", "/bin/echo", "one")
    assert done.stdout == b"[0] one\n"
    assert b"--top has no effect: standard output is not a terminal" in done.stderr


def test_a_port_without_a_page_is_refused(ronde):
    done = ronde("top", "--port", "8080")
    assert done.returncode == 64
    assert b"--port has no effect without --web" in done.stderr
