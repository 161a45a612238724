"""Statuses as values, the table's readers, and what ``ronde ps`` draws of them."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from select import POLLOUT

import pytest
from tests.limits import HANG_S

from ronde.errors import LaunchError
from ronde.launch import (
    Statuses,
    StatusService,
    StatusText,
    find_sockets,
    own_environment,
    wait_for,
    watch,
)
from ronde.monitor import (
    Fault,
    InspectedJob,
    Inspection,
    KernelLine,
    StackFrame,
    Verdict,
    explain_hang,
    find_kernel_lines,
)
from ronde.render import draw_hang, draw_jobs
from ronde.status import (
    UNKNOWN,
    JobInfo,
    JobStatus,
    PendingCollective,
    RankStatus,
    StepTime,
    WorkerInfo,
    decode_status,
    encode_status,
)

JOB = JobInfo("20261129-1", ("python", "train.py"), 0.0, "node0", 7, 0)


def collective(name="x", age_s=5.0, ranks=()):
    return PendingCollective(name, "all", "allreduce", 0, 64, age_s, ranks)


def status(*collectives, step=10):
    num = len(collectives)
    return RankStatus(9, step, tuple(collectives), num, 1 << 20, 0, {})


def worker(rank, found=None, state="running", code=None, age_s=0.5):
    host = f"node{rank // 8}"
    return WorkerInfo(rank, rank, host, 100 + rank, state, code, age_s, found)


def table(*workers):
    return JobStatus(Path("socket"), 1, JOB, workers)


def test_a_collective_waits_for_ranks_that_are_known_not_to_be_in_it():
    job = table(
        worker(0, status(collective())),
        worker(1, status(collective())),
        worker(2, status()),  # elsewhere
        worker(3, status(collective("y"))),  # in another one
        worker(4),  # reports nothing
        worker(5, status(collective()), "ended", 3),
        worker(6, status(), age_s=9.0),  # was elsewhere before it began
        worker(7, None, "lost"),
    )
    awaited = job.find_awaited()
    assert awaited[0] == awaited[1] == (2, 3, 5, 7)
    assert awaited[3] == (0, 1, 2, 5, 7)
    assert awaited.keys() == {0, 1, 3}


def test_a_collective_of_some_ranks_waits_for_those_alone():
    of_two, unknown = collective(ranks=(0, 2)), collective(ranks=(UNKNOWN,))
    job = table(
        worker(0, status(of_two)), worker(1, status()), worker(2, status(unknown))
    )
    assert job.find_awaited() == {0: ()}
    job = table(worker(0, status(of_two)), worker(1, status()), worker(2, status()))
    assert job.find_awaited() == {0: (2,)}


def test_a_rank_is_in_a_collective_for_as_long_as_it_reports_no_other():
    assert worker(0, status(collective(age_s=0.01))).collective_age_s == 0.01
    silent = worker(0, status(collective(age_s=0.5)), age_s=4.0)
    assert silent.collective_age_s == 4.5
    assert worker(0, status()).collective_age_s == 0.0


def test_a_status_is_one_line_that_the_kernel_takes_whole():
    long = [collective(f"{'é' * 200}{n}", ranks=tuple(range(2000))) for n in range(8)]
    whole, cut = status(collective()), encode_status(status(*long))
    assert decode_status(json.loads(encode_status(whole))) == whole
    assert len(cut) <= 8 << 10
    found = decode_status(json.loads(cut))
    assert found.num_collectives == 8
    assert [each.ranks for each in found.collectives] == [(UNKNOWN,)]
    assert decode_status({"step": 3}) is None
    timed = whole._replace(steps=(StepTime(3, 0.5, 0.25, 0.0, 0.0),))
    plain = json.loads(encode_status(timed))
    assert decode_status(plain) == timed
    for bad in ([[3, 0.5]], [[3, 1, 1, 1, "x"]], [3], 3):
        assert decode_status({**plain, "steps": bad}) is None


def test_few_ranks_are_drawn_one_a_line():
    drawn = draw_jobs(
        [
            table(
                worker(0, status(collective("gradients.layer1.weight"))),
                worker(1, status(step=9)),
                worker(2),
                worker(3, None, "ended", -9),
            )
        ]
    )
    assert max(map(len, drawn.splitlines())) <= 80
    rows = [line.split() for line in drawn.splitlines()[4:]]
    assert rows[0][:5] == ["0", "node0", "100", "10", "gradients.layer1.weight"]
    assert rows[0][5:] == ["5s", "1,", "3"]
    assert rows[1] == ["1", "node0", "101", "9", "not", "in", "a", "collective"]
    assert rows[2][4:] == ["reports", "nothing"]
    assert rows[3][4:] == ["killed", "by", "SIGKILL"]
    assert draw_jobs([]) == "No job of yours runs on this host.\n"


def test_of_many_ranks_hosts_and_outliers_are_drawn():
    own = [worker(n, status(collective(age_s=30.0))) for n in range(1000)]
    own[612] = worker(612, status(step=9))
    drawn = draw_jobs([table(*own)])
    lines = drawn.splitlines()
    assert len(lines) < 45
    assert max(map(len, lines)) <= 80
    assert "and 105 more hosts" in lines
    assert lines[4].split() == ["node76", "8", "9-10", "7", "30s", "612"]
    outliers = lines[lines.index("The ranks to look at first:") + 2 : -1]
    assert any(line.split()[:4] == ["612", "node76", "712", "9"] for line in outliers)
    assert len(draw_jobs([table(*own)], is_complete=True).splitlines()) == 1004


ROWS = tuple(worker(n, age_s=0.0) for n in range(2000))


@pytest.fixture
def observed():
    """Return the list of the lines that went to the observers."""
    return []


@pytest.fixture
def service(observed):
    found = StatusService("a job", ("sleep", "100"), stall_s=0.5)
    found.begin(1, lambda: ROWS, lambda sent: observed.append(json.loads(sent.line)))
    with closing(found):
        yield found


def serve(service, is_done):
    """Turn the service's loop, which never waits for a reader."""
    ends_at_s = time.monotonic() + HANG_S
    while not is_done():
        assert time.monotonic() < ends_at_s
        service.advance()
        serving = {fd: call for fd, _, call in service.watched()}
        writable = [fd for fd, events, _ in service.watched() if events & POLLOUT]
        for fd in wait_for(list(serving), writable, 0.01):
            serving[fd]()


def own_socket(service):
    return next(path for path in find_sockets() if path.parent == service.directory)


def test_a_reader_that_stalls_or_dies_slows_nobody(service):
    """One reads, one never reads, one dies at once: the first gets new versions."""
    text = encode_status(status(collective()))
    service.on_statuses(Statuses(tuple(StatusText(n, text, 0.5) for n in range(1000))))
    for bad in ("[" * 4000, "[]", "no JSON", '{"step": NaN}'):
        service.on_statuses(Statuses((StatusText(1999, bad, 0.0),)))
    path, lines = own_socket(service), []
    reading, stalled, dead = (socket.socket(socket.AF_UNIX) for _ in range(3))
    with reading, stalled:
        for each in (reading, stalled, dead):
            each.connect(str(path))
        dead.close()
        reading.setblocking(False)
        unread = b""

        def has_read_three():
            nonlocal unread
            while wait_for([reading.fileno()], [], 0):
                data = reading.recv(1 << 20)
                assert data, "it was dropped"
                *complete, unread = (unread + data).split(b"\n")
                lines.extend(complete)
            return len(lines) >= 3

        serve(service, has_read_three)
        # Of the one that stalled only what its socket took is left, and then its end.
        serve(service, lambda: len(list(service.watched())) == 2)
        rest = stalled.makefile("rb").read()
    assert b"\n" not in rest
    versions = [json.loads(line) for line in lines]
    numbers = [each["version"] for each in versions]
    assert numbers == sorted(set(numbers))
    rows = versions[0]["workers"]
    assert decode_status(rows[999]["status"]) == status(collective())
    assert [rows[1000]["status"], rows[1999]["status"]] == [None, None]
    assert versions[0]["job"]["restarts"] == 1


def test_questions_reach_the_observers_and_answers_their_reader(service, observed):
    path = str(own_socket(service))
    asking, other, bad = (socket.socket(socket.AF_UNIX) for _ in range(3))
    with asking, other, bad:
        for each in (asking, other, bad):
            each.connect(path)
        bad.sendall(b"[1]\n")
        asking.sendall(b'{"ask": "inspect", "reader"')
        asking.sendall(b": 99}\n")
        serve(service, lambda: observed)
        (question,) = observed
        number = question.pop("reader")
        assert (question, number != 99) == ({"ask": "inspect"}, True)
        for line in ("no JSON", "[]", '{"reader": 1234567}', f'{{"reader": {number}}}'):
            service.on_observed("node1", line)
        received = bytearray()

        def has_answer():
            while wait_for([asking.fileno()], [], 0):
                received.extend(asking.recv(1 << 20))
            return b'"answer"' in received and received.endswith(b"\n")

        serve(service, has_answer)
        lines = [json.loads(line) for line in received.splitlines()]
        answer = {"host": "node1", "answer": {"reader": number}}
        assert [line for line in lines if "version" not in line] == [answer]
        asking.shutdown(socket.SHUT_RDWR)
        serve(service, lambda: len(list(service.watched())) == 2)


def test_answers_are_sent_before_the_table_ends(service, observed):
    """Longer ones than a socket takes; a reader that has died costs no time."""
    asking, dead = (socket.socket(socket.AF_UNIX) for _ in range(2))
    received = bytearray()

    def read():
        while data := asking.recv(1 << 16):
            received.extend(data)

    with asking, dead:
        for each in (asking, dead):
            each.connect(str(own_socket(service)))
            each.sendall(b'{"until_end": true}\n')
        serve(service, lambda: len(observed) == 2)
        dead.close()
        for question in observed:
            line = {"reader": question["reader"], "text": "x" * (4 << 20)}
            service.on_observed("node1", json.dumps(line))
        thread = threading.Thread(target=read)
        thread.start()
        service.close()
        thread.join()
    answers = [line for line in received.splitlines() if b'"answer"' in line]
    assert [len(json.loads(each)["answer"]["text"]) for each in answers] == [4 << 20]


def test_a_table_of_another_version_is_refused(tmp_path):
    path = tmp_path / "status"
    plain = {**JOB._asdict(), "new": 1}
    line = json.dumps({"version": 1, "job": plain, "workers": []}) + "\n"

    def answer():
        with listener.accept()[0] as sock:
            sock.sendall(line.encode())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(LaunchError, match="another version of ronde"):
            next(watch(path))
        thread.join()


FAILS_ONCE = """
import threading
from ronde.status import Part, add_source
class Source:
    num_looks = 0
    def report(self):
        self.num_looks += 1
        if self.num_looks == 1:
            raise RuntimeError("a table changed meanwhile")
        return Part(step=7)
source = Source()
add_source(source.report)
threading.Event().wait()
"""


def test_a_source_that_fails_once_ends_no_reports():
    own, other = socket.socketpair()
    with own, other:
        inode = os.fstat(other.fileno()).st_ino
        env = {
            **own_environment(),
            "RONDE_CHANNEL": f"{other.fileno()}:{inode}:0:plain",
        }
        words = [sys.executable, "-c", FAILS_ONCE]
        with subprocess.Popen(words, env=env, pass_fds=[other.fileno()]) as process:
            try:
                own.settimeout(HANG_S)
                with own.makefile() as lines:
                    texts = (line.removeprefix("status ") for line in lines)
                    assert any(json.loads(text)["step"] == 7 for text in texts)
            finally:
                process.kill()


def test_many_ranks_show_those_at_fault_first():
    rows = tuple(worker(n, age_s=9.0) for n in range(1000))
    kernel_lines = {"node3": (KernelLine(8.0, "NVRM: Xid (0000:3b:00): 79"),)}
    table = JobStatus(Path("x"), 1, JOB, rows)
    own = InspectedJob(table, {}, kernel_lines, ("node2",), {})
    fault = Fault("dead", (612,), "Rank 612 has left.")
    lines = draw_hang(own, Verdict((fault,), ())).splitlines()
    assert max(map(len, lines)) <= 80
    assert "Rank 612 has left." in lines
    assert "No answer within 3 s from node2." in lines
    text = "The kernel of node3 wrote 8s ago: NVRM: Xid (0000:3b:00): 79"
    assert text in lines
    first = [line.split()[0] for line in lines if line]
    assert first[first.index("rank") :][:3] == ["rank", "612", "0"]
    assert lines[-1] == "and 968 more ranks; --json shows all"


def test_a_rank_in_its_data_loader_is_at_fault_below_the_hook_that_measures_it():
    """It has not reported since the others wait, so its stack decides."""
    places = [
        ("wait", "/usr/lib/python3.11/threading.py"),
        ("_next_data", "/venv/site-packages/torch/utils/data/dataloader.py"),
        ("measured", "/venv/site-packages/ronde/torch_entry.py"),
        ("train", "train.py"),
    ]
    frames = [StackFrame(*place, 7, place[1] == "train.py") for place in places]
    own = Inspection(1, 101, "S", "", 0.0, 0.0, tuple(frames), "")
    job = table(worker(0, status(collective())), worker(1, status(), age_s=9.0))
    (fault,) = explain_hang(job, {1: own}).faults
    assert (fault.kind, fault.ranks) == ("input", (1,))


def test_trouble_in_the_kernel_log_is_found(tmp_path):
    lines = [
        "6,1,100000000,-;nfs: server old not responding, still trying",
        "6,2,1000000000,-;eth0: link becomes ready",
        "4,3,1001000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
    ]
    for name, text in {
        "dev/kmsg": "\n".join(lines) + "\n",
        "proc/uptime": "1009.0 1.0",
    }.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    [(age_s, text)] = find_kernel_lines(str(tmp_path))
    assert (age_s, text[:9]) == (8.0, "NVRM: Xid")
    assert find_kernel_lines(str(tmp_path / "none")) == ()
