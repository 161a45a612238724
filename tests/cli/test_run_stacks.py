"""Where the ranks are: asked with SIGQUIT, and shown when --timeout ends a job."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap

from tests.cli.conftest import read_lines
from tests.limits import HANG_S

from ronde.processes import read_process

HANGING = """
import ctypes, os, sys, threading, time
def nap():
    time.sleep(1000)
def hold():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never returns, and holds the interpreter
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
def wait():
    threading.Event().wait()
threading.Thread(target=wait, daemon=True).start()
print("pid", os.getpid(), flush=True)
{"0": nap, "1": nap, "2": hold}.get(os.environ["RANK"], lambda: os.execl(
    "/bin/sh", "sh", "-c", "sleep 1000 & wait"))()
"""


def place(stacks: str, word: str) -> str:
    """Return what is said of the place where that word stands."""
    (found,) = [part for part in stacks.split("|\n") if word in part]
    return found


def test_timeout_ends_a_job_that_hangs(ronde, tmp_path):
    report = tmp_path / "end.json"
    limits = ("--timeout", "500ms", "--grace", "1s", "--error-file", str(report))
    done = ronde("run", "-n", "2", *limits, "/bin/sleep", "1000")
    said = done.stderr.decode()
    assert done.returncode == 124, said
    assert "ronde: --timeout ended the job, exit code 124\n" in said
    assert "ended then: ranks 0-1 on" in said
    verdict = json.loads(report.read_text())["verdict"]
    assert (verdict["exit_code"], verdict["interrupted_by"]) == (124, "timeout")


def test_a_timeout_shows_all_stacks(ronde, tmp_path):
    program = tmp_path / "hang.py"
    program.write_text(HANGING)
    words = ("-n", "4", "--timeout", "1h", "--grace", "1s", "--no-prefix")
    with ronde.start("run", *words, str(program)) as process:
        try:
            lines = read_lines(process, b"pid", 4)
            pids = [int(line.split()[1]) for line in lines]
            said = ""
            # The ranks say so a moment before they are there.
            wanted = ("ranks 0-1 on", "in nap", "in hold", "(sleep,")
            while not all(word in said for word in wanted):
                process.send_signal(signal.SIGQUIT)
                said = read_stacks(process)
            # What --timeout does when its time is over.
            process.send_signal(signal.SIGALRM)
            _, end = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    said = end.decode()
    assert process.returncode == 124, said
    assert "+-- ronde: where the ranks are, most recent call first" in said
    nap = place(said, "in nap")
    assert re.search(r"\| ranks 0-1 on \S+ \(python\S*, pids \d+, \d+\)\n", nap)
    assert f'File "{program}", line 4 in nap' in nap
    assert "another thread" in nap
    assert "in wait" in nap
    assert "rank 2 on" in place(said, "in hold")
    assert "rank 3 on" in place(said, "(sh, pid")
    assert "no Python stack" in place(said, "(sleep, pid")
    assert all(read_process(pid) is None for pid in pids)


def read_stacks(process: "subprocess.Popen[bytes]") -> str:
    """Return what is shown up to the end of a block of stacks."""
    said = b""
    while not said.endswith(b"-" * 77 + b"\n") or said.count(b"+--") < 2:
        ready, _, _ = select.select([process.stderr], [], [], HANG_S)
        data = os.read(process.stderr.fileno(), 65536) if ready else b""
        assert data, said
        said += data
    return said.decode()


def run_gated(ronde, tmp_path, code: str, *words: str):
    """Start ranks that may wait on ``gate``, a pipe, until something is written."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = tmp_path / "gated.py"
    program.write_text(f"gate = {str(gate)!r}\n" + textwrap.dedent(code))
    return gate, ronde.start("run", *words, str(program))


def test_sigquit_shows_the_stacks_and_the_job_goes_on(ronde, tmp_path):
    code = """
        import os
        def pass_gate():
            print("here", flush=True)
            os.read(os.open(gate, os.O_RDONLY), 1)
        pass_gate()
    """
    gate, process = run_gated(ronde, tmp_path, code, "-n", "3")
    with process:
        try:
            read_lines(process, b"here", 3)
            said = ""
            # They say so a moment before they are there.
            while "ranks 0-2 on" not in said:
                process.send_signal(signal.SIGQUIT)
                said = read_stacks(process)
            process.send_signal(signal.SIGQUIT)
            assert read_stacks(process) == said
            assert "ranks 0-2 on" in place(said, "in pass_gate")
            with gate.open("r+b", buffering=0) as opened:
                opened.write(b"...")
                process.communicate(timeout=HANG_S)
            assert process.returncode == 0
        finally:
            process.kill()


ALL_REDUCE = """
    import os, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    def lag():
        time.sleep(1000)
    def meet():
        dist.all_reduce(torch.ones(4))
    print("here", flush=True)
    lag() if dist.get_rank() == 1 else meet()
"""


def test_stacks_show_the_rank_missing_from_a_collective(ronde, tmp_path):
    _, process = run_gated(ronde, tmp_path, ALL_REDUCE, "-n", "2", "--grace", "1s")
    with process:
        try:
            read_lines(process, b"here", 2)
            parts = [""]
            wanted = [("rank 1 on", "in lag"), ("rank 0 on", "in all_reduce")]
            # They say so a moment before they are there.
            while not all(any(r in p and w in p for p in parts) for r, w in wanted):
                process.send_signal(signal.SIGQUIT)
                parts = read_stacks(process).split("|\n")
            # What --timeout does when its time is over.
            process.send_signal(signal.SIGALRM)
            _, end = process.communicate(timeout=HANG_S)
            assert process.returncode == 124, end
            assert b"in all_reduce" in end
        finally:
            process.kill()


def test_a_rank_that_is_stopped_is_said_to_be(ronde, tmp_path):
    code = """
        import os, signal
        print("here", os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    """
    _, process = run_gated(ronde, tmp_path, code, "-n", "1")
    with process:
        try:
            pid = int(process.stdout.readline().split()[-1])
            while read_process(pid).state != "T":
                assert process.poll() is None
            process.send_signal(signal.SIGQUIT)
            assert "is stopped" in read_stacks(process)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=HANG_S)
            assert process.returncode == 143
        finally:
            process.kill()


def test_a_program_that_knows_nothing_of_it_gets_no_signal(ronde, tmp_path):
    code = """
        import os, signal, sys
        signal.signal(signal.SIGURG, lambda *_: print("signalled", flush=True))
        print("here", flush=True)
        signal.pause()
    """
    program = tmp_path / "own.py"
    program.write_text(textwrap.dedent(code))
    words = ("run", "-n", "1", "--", sys.executable, "-I", "-S", str(program))
    with ronde.start(*words) as process:
        try:
            read_lines(process, b"here", 1)
            process.send_signal(signal.SIGQUIT)
            assert "no Python stack" in read_stacks(process)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=HANG_S)
            assert b"signalled" not in out
        finally:
            process.kill()


def test_a_program_that_calls_exec_is_not_killed_by_it(ronde, tmp_path):
    program = tmp_path / "execs.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys
        left = int(sys.argv[1])
        print("here", flush=True)
        left and os.execv(sys.executable, [sys.executable, __file__, str(left - 1)])
    """)
    )
    words = ("run", "-n", "2", "--no-prefix", str(program), "60")
    with ronde.start(*words, stderr=subprocess.DEVNULL) as process:
        try:
            read_lines(process, b"here", 2)
            while select.select([process.stdout], [], [], HANG_S)[0]:
                if not os.read(process.stdout.fileno(), 65536):
                    break
                process.send_signal(signal.SIGQUIT)
            assert process.wait(timeout=HANG_S) == 0
        finally:
            process.kill()


SITE = "import sys; print('user', __name__, file=sys.stderr)"
ASK = "import sys; print('sitecustomize' in sys.modules, *[p for p in sys.path if 'sta"
ASK += "rtup' in p])"


def test_the_users_own_sitecustomize_is_imported_as_ever(ronde, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    words = ("-n", "1", "--no-prefix", "--", sys.executable, "-c", ASK)
    done = ronde("run", "-x", f"PYTHONPATH={tmp_path}", *words)
    assert (done.stdout, done.stderr) == (b"True\n", b"user sitecustomize\n")
    # In a job within a job too, and where there is none.
    nested = ("run", "-n", "1", "--no-prefix", "--", sys.executable, "-m", "ronde")
    done = ronde(*nested, "run", "--nested", *words)
    assert (done.stdout, done.stderr) == (b"False\n", b"")
