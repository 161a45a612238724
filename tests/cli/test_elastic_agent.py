"""An agent of an elastic job: ranks come and go, and each has a channel."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S, until

from ronde.launch import (
    AgentNode,
    Credit,
    Exited,
    Finished,
    Hello,
    Host,
    NodeJob,
    Output,
    Ping,
    Pong,
    ProcessTransport,
    Ready,
    Relayed,
    SendToWorkers,
    SignalWorker,
    Start,
    Started,
    StartWorkers,
    Statuses,
    StopWorkers,
    StoreService,
    WorkerEnding,
    WorkerSpec,
    WorkerStopped,
    WorkerTexts,
    own_environment,
    start_local_agent,
    wait_for,
)
from ronde.processes import read_process

MIB = 1 << 20

# Each line is Python to evaluate; the result goes back as a line of JSON.
RANK = """
import ctypes, json, os, socket, subprocess, sys, threading
fd, inode, number = map(int, os.environ["RONDE_CHANNEL"].split(":")[:3])
assert os.fstat(fd).st_ino == inode
channel = socket.socket(fileno=fd)
lines = channel.makefile("r", encoding="utf-8")
answers = channel.makefile("w", encoding="utf-8")

def say(value):
    print("member", json.dumps(value), file=answers, flush=True)

def child():
    return subprocess.Popen(["sleep", "100"]).pid

def wait_in_store():
    from ronde.store import Op, Status, decode, dial, encode
    sock = dial(os.environ["RONDE_STORE"], 20.0)
    sock.sendall(encode(Op.SET, [b"old", b""]) + encode(Op.WAIT, [b"never"]))
    assert decode(sock.recv(4096)[4:]).kind == Status.DONE
    say("waits")
    reply = decode(sock.recv(4096)[4:])
    return Status(reply.kind).name, reply.fields[0].decode()

def exit_first_thread(status):
    # What the kernel does first when it ends a process; the rest then waits.
    from ronde.membership import lock_new_mutex
    socket.send_fds(channel, [b'member "locked"\\n'], [lock_new_mutex()])
    def end():
        lines.readline()
        os._exit(status)
    threading.Thread(target=end).start()
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(status))

say(["begins", number])
for line in lines:
    say(eval(line.removeprefix("member ")))
say("alone")
"""


def rank(number: int) -> WorkerSpec:
    return WorkerSpec(number, {})


class Controller:
    """What speaks with one agent."""

    def __init__(self, process):
        self.reaper_process = process
        transport = ProcessTransport(process)
        self.node = AgentNode(Host("here"), transport, is_here=True)
        self.store = StoreService(0)
        self.send = self.node.send
        self._received = deque()
        self._texts = deque()

    def expect(self, kind):
        """Return the next message, which must be of this kind."""
        ends_at = time.monotonic() + HANG_S
        while not self._received:
            left_s = ends_at - time.monotonic()
            assert left_s > 0, f"no {kind} within {HANG_S:g} s"
            transport = self.node.transport
            writable = [transport.write_fd] if self.node.is_writing else []
            wait_for([transport.read_fd], writable, left_s)
            self.node.flush()
            received = self.node.receive()
            assert received is not None, self.node.explain_end()
            for message in received:
                if isinstance(message, Relayed):
                    self.store.on_relayed(self.node, message)
                elif isinstance(message, Output):
                    sys.stderr.write(message.data.decode())
                    self.send(Credit(len(message.data)))
                else:
                    self._received.append(message)
        message = self._received.popleft()
        assert isinstance(message, kind), message
        return message

    def hear_any(self):
        """Return what any rank says next."""
        while not self._texts:
            self._texts += self.expect(WorkerTexts).texts
        return self._texts.popleft()

    def hear(self, number):
        """Return what this rank says next, before all others."""
        text = self.hear_any()
        assert text.worker == number
        return json.loads(text.text)

    def ask(self, number, line):
        self.send(SendToWorkers((number,), line))
        return self.hear(number)

    def settle(self):
        """Return once all that was sent is done; nothing must have come before."""
        self.send(Ping(0.0, 0.0, ()))
        self.expect(Pong)

    def prepare(self, *argv, ranks=(), max_ranks=4, **others):
        values = {"epoch": 0, "job_marker": os.urandom(8).hex(), "cwd": ""}
        values |= {"grace_s": 5.0, "address": "", "master_port": 0} | others
        env = {"PYTHONPATH": os.pathsep.join(sys.path)}
        specs = tuple(map(rank, ranks))
        self.send(
            NodeJob(argv=argv, env=env, workers=specs, max_ranks=max_ranks, **values)
        )

    def begin(self, *argv, ranks=(), **others):
        self.prepare(*argv, ranks=ranks, **others)
        self.expect(Ready)
        self.send(Start("127.0.0.1", 1))
        return [self.expect(Started).pid for _ in ranks]

    def start(self, number):
        """Start a rank of ``RANK`` and return its process."""
        self.send(StartWorkers((rank(number),)))
        started = self.expect(Started)
        assert started.worker == number
        assert self.hear(number) == ["begins", number]
        return started.pid

    def stop(self, number=signal.SIGTERM):
        self.send(StopWorkers(number))


@contextmanager
def running(*argv, **others):
    with pytest.MonkeyPatch.context() as patch:
        for name in own_environment().keys() - clean_environment().keys():
            patch.delenv(name)
        process = start_local_agent()
    controller = Controller(process)
    try:
        controller.expect(Hello)
        if argv:
            controller.begin(*argv, **others)
        yield controller
    finally:
        controller.node.close()
        assert process.wait(HANG_S) == 0


@pytest.fixture
def controller():
    """The controller of a job that has no rank yet."""
    with running(sys.executable, "-S", "-c", RANK) as controller:
        yield controller


def wait_for_end(process_fd):
    assert wait_for([process_fd], [], HANG_S)
    os.close(process_fd)


def test_ranks_come_and_go_until_the_job_is_stopped(controller):
    controller.start(5)
    controller.start(2)
    assert controller.ask(5, "6 * 7") == 42
    assert controller.ask(2, "os.environ['MASTER_ADDR']") == "127.0.0.1"
    controller.send(SendToWorkers((5,), "sys.exit(3)"))
    exited = controller.expect(Exited)
    assert (exited.worker, exited.status, exited.stopped_s) == (5, 3, 0.0)
    controller.send(SendToWorkers((5, 2), "'to those that are there'"))
    assert controller.hear(2) == "to those that are there"
    controller.send(SendToWorkers((), "'all'"))
    assert controller.hear(2) == "all"
    controller.send(SendToWorkers((2,), "sys.exit()"))
    assert controller.expect(Exited).status == 0
    controller.start(7)  # it goes on without any
    controller.stop()
    exited = controller.expect(Exited)
    assert (exited.worker, exited.status) == (7, -signal.SIGTERM)
    assert exited.stopped_s
    assert controller.expect(Finished) == Finished(0, ())


def test_messages_of_a_rank_come_before_its_exit(controller):
    controller.start(0)
    line = "[say(n) for n in range(500)] and os._exit(4)"
    controller.send(SendToWorkers((0,), line))
    assert [controller.hear(0) for _ in range(500)] == list(range(500))
    assert controller.expect(Exited).status == 4


def test_a_line_without_end_harms_nobody_else(controller):
    first = controller.start(0)
    controller.start(1)
    line = f"answers.write('\\1' * {5 * MIB})"
    controller.send(SendToWorkers((0,), line))
    assert controller.ask(1, "1") == 1
    os.kill(first, signal.SIGKILL)
    assert controller.expect(Exited).worker == 0


def test_a_rank_is_ended_with_its_children_while_others_stay(controller):
    controller.start(0)
    controller.start(1)
    child_fd = os.pidfd_open(controller.ask(0, "child()"))
    controller.send(SignalWorker(0, signal.SIGTERM))
    exited = controller.expect(Exited)
    assert (exited.worker, exited.status) == (0, -signal.SIGTERM)
    wait_for_end(child_fd)
    controller.send(SignalWorker(0, signal.SIGKILL))  # it is gone
    assert controller.ask(1, "1") == 1


def test_a_rank_that_ends_is_reported_before_it_has_ended(controller):
    for number, status in enumerate((7, 0)):
        pid = controller.start(number)
        order = SendToWorkers((number,), f"exit_first_thread({status})")
        controller.send(order)
        assert controller.hear(number) == "locked"
        if status:
            expected = WorkerEnding(number, status, "")
            assert controller.expect(WorkerEnding) == expected
        until(lambda pid=pid: read_process(pid).state == "Z")
        controller.settle()
        controller.send(SendToWorkers((number,), "end"))
        exited = controller.expect(Exited)
        assert (exited.worker, exited.status) == (number, status)


def test_a_stopped_rank_is_reported_and_can_be_ended(controller):
    pid = controller.start(3)
    for is_stopped in (True, False, True):
        os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
        expected = WorkerStopped(3, is_stopped)
        assert controller.expect(WorkerStopped) == expected
    controller.send(SignalWorker(3, signal.SIGTERM))
    message = controller.expect((WorkerStopped, Exited))
    if isinstance(message, WorkerStopped):
        message = controller.expect(Exited)
    assert message.status == -signal.SIGTERM


def test_unread_messages_of_a_stopped_rank_are_kept_up_to_a_limit(controller):
    pids = [controller.start(number) for number in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        assert controller.expect(WorkerStopped).is_stopped
    line = f"len({'x' * 10 * MIB!r})"

    def fill(number, num_lines):
        for _ in range(num_lines):
            controller.send(SendToWorkers((number,), line))
            controller.settle()
        controller.send(SignalWorker(number, signal.SIGCONT))
        assert not controller.expect(WorkerStopped).is_stopped

    fill(0, 2)
    assert [controller.hear(0) for _ in range(2)] == [10 * MIB] * 2
    fill(1, 4)
    # It reads what its socket held: a line cut short.
    exited = controller.expect(Exited)
    assert (exited.worker, exited.status) == (1, 1)
    assert controller.ask(0, "1") == 1


def test_a_rank_that_does_not_start_is_reported_and_the_others_go_on(tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable} -S\n{RANK}")
    program.chmod(0o755)
    with running(str(program)) as controller:
        controller.start(0)
        program.unlink()
        controller.send(StartWorkers((rank(1), rank(2))))
        for number in (1, 2):
            exited = controller.expect(Exited)
            assert (exited.worker, exited.status) == (number, 127)
            assert f"{program}: No such file" in exited.evidence
        assert controller.ask(0, "1") == 1
        counts = []
        for number in range(3, 13):
            controller.send(StartWorkers((rank(number),)))
            assert controller.expect(Exited).worker == number
            counts.append(num_descriptors(controller))
        assert_flat(counts)


def num_descriptors(controller):
    """Count those of the agent, which is the first child of its reaper."""
    controller.settle()
    reaper = controller.reaper_process.pid
    listed = Path(f"/proc/{reaper}/task/{reaper}/children").read_text()
    agent, *_ = listed.split()  # others are orphans that are about to be reaped
    return len(list(Path(f"/proc/{agent}/fd").iterdir()))


def assert_flat(counts):
    """See that nothing stays; for a moment another agent may try this one's socket."""
    half = len(counts) // 2
    assert min(counts[:half]) == min(counts[half:]), counts


def test_waiting_store_requests_are_refused_when_it_is_cleared(controller):
    controller.start(0)
    assert controller.ask(0, "wait_in_store()") == "waits"
    controller.store.clear()
    kind, reason = controller.hear(0)
    assert (kind, "was cleared" in reason) == ("REFUSED", True)


def test_a_job_begins_once_no_process_of_its_host_is_left():
    with running() as controller:
        marker = os.urandom(8).hex()
        env = clean_environment() | {"RONDE_COOKIE": marker}
        with subprocess.Popen(["/bin/sleep", "100"], env=env) as left:
            # The kernel lets Popen go on before it sets the environment.
            environ = Path(f"/proc/{left.pid}/environ")
            until(lambda: marker.encode() in environ.read_bytes(), "an environment")
            controller.prepare("true", job_marker=marker)
            assert not wait_for([controller.node.transport.read_fd], [], 0.3)
            left.kill()
        controller.expect(Ready)


FLOOD = """
import os, signal, socket
fd, _, worker, _ = os.environ["RONDE_CHANNEL"].split(":")
channel = socket.socket(fileno=int(fd))
if worker == "0":
    junk = b"\\xff\\xfe\\n\\nrubbish\\nmember {}\\nexit soon\\nexit 1 2 3\\n"
    socket.send_fds(channel, [junk + b"status " + b"x" * 9000 + b"\\n"], [0])
    for number in range(50_000):
        channel.sendall(b"status %d\\n" % number)
channel.close()
signal.pause()
"""


def test_a_plain_job_sends_statuses_and_nothing_else_that_ranks_write():
    words = (sys.executable, "-S", "-c", FLOOD)
    with running(*words, ranks=(0, 1, 2), max_ranks=0) as controller:
        seen = 0
        while seen < 49_999:
            (status,) = controller.expect(Statuses).statuses
            assert status.worker == 0
            assert int(status.text) > seen or not seen
            seen = int(status.text)
        controller.stop()
        for _ in range(3):
            assert controller.expect(Exited).status == -signal.SIGTERM
        controller.expect(Finished)
