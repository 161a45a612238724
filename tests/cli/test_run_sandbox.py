"""Where the kernel shows or allows less: programs run, or are refused in a sentence."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.limits import HANG_S
from tests.namespaces import why_not

from ronde.world import boot_identity, network_identity

SPACE = ("unshare", "--user", "--map-root-user", "--mount")
NO_BOOT_NAME = (*SPACE, "sh", "-c", 'mount -t tmpfs none /proc/sys && exec "$@"', "sh")
NO_PROCESSES = (*SPACE, "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
OTHERS_PROCESSES = (*SPACE, "--pid", "--fork", "--kill-child")
PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def in_sandbox(*words, space=NO_BOOT_NAME):
    """Run words where ``/proc`` shows less than elsewhere."""
    if reason := why_not(space):
        pytest.skip(reason)
    return subprocess.run(
        [*space, *words], capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_ranks_run_where_the_boot_has_no_name():
    command = (sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix", "--")
    done = in_sandbox(*command, sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_processes_of_one_machine_agree_on_it():
    code = "from ronde.world import network_identity; print(network_identity())"
    words = (sys.executable, "-c", code)
    here = subprocess.run(words, capture_output=True, text=True, check=True)
    assert here.stdout.strip() == network_identity()
    hidden = in_sandbox(*words)
    assert hidden.returncode == 0, hidden.stderr
    assert hidden.stdout.strip().rpartition("/")[2] == network_identity().split("/")[1]
    assert boot_identity() not in hidden.stdout


# Rank 0 fails. Rank 1, told to end, leaves an orphan that gets rank 0's number and ends
# well: the kernel gives the number after the one in ``ns_last_pid``.
RECYCLE = """
import os, signal, time
from pathlib import Path

folder = Path(os.environ["FOLDER"])
if os.environ["RANK"] == "0":
    while not (folder / "ready").exists():
        time.sleep(0.01)
    (folder / "pid").write_text(str(os.getpid()))
    os._exit(3)

def end(*_):
    pid = int((folder / "pid").read_text())
    if os.fork() == 0:
        for _ in range(1000):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
            child = os.fork()
            if child == 0:
                while os.getppid() > 1 and os.getppid() != int(os.environ["AGENT"]):
                    time.sleep(0.01)
                os._exit(0)
            if child == pid:
                print("recycled", flush=True)
                os._exit(0)
            os.kill(child, 9)
            os.waitpid(child, 0)
            time.sleep(0.01)
        os._exit(0)
    os.wait()
    os._exit(0)

os.environ["AGENT"] = str(os.getppid())
signal.signal(signal.SIGTERM, end)
(folder / "ready").touch()
time.sleep(600)
"""


def test_an_orphan_that_gets_a_failed_ranks_number_does_not_end_in_its_name(tmp_path):
    space = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if reason := why_not(space):
        pytest.skip(reason)
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        pytest.skip("the next process number cannot be chosen here")
    report = tmp_path / "report"
    options = ("-n", "2", "-x", f"FOLDER={tmp_path}", "--grace", "3s")
    options += ("--error-file", str(report))
    command = (sys.executable, "-m", "ronde", "run", *options, "--")
    done = subprocess.run(
        [*space, *command, sys.executable, "-I", "-S", "-c", RECYCLE],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert "recycled" in done.stdout, done.stderr
    assert done.returncode == 3, done.stderr
    cause = json.loads(report.read_text())["verdict"]["cause"]
    assert (cause["rank"], cause["exit_code"]) == (0, 3)


# A seccomp filter that refuses ``pidfd_open``, as an old kernel or a container does.
REFUSE = """
import ctypes, os, struct, sys
PIDFD_OPEN, LOAD, EQUAL, RETURN = 434, 0x20, 0x15, 0x06
steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, PIDFD_OPEN),
         (RETURN, 0, 0, 0x00050000 | int(sys.argv[1])), (RETURN, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
program = Program(len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
for words in ((38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0)):
    if libc.prctl(*words):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[2], sys.argv[2:])
"""
FAMILY = """
setsid sleep 600 & setsid sh -c 'sleep 600 & sleep 600' &
[ "$RANK" = 1 ] && sleep 600
exit 3
"""


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM])
def test_nothing_is_left_where_processes_cannot_be_held(refusal):
    cookie = f"SANDBOX_TEST={os.urandom(8).hex()}"
    ronde = ("-m", "ronde", "run", "-n", "2", "-x", cookie)
    refusing = (sys.executable, "-c", REFUSE, str(int(refusal)), sys.executable)
    done = subprocess.run(
        [*refusing, *ronde, "--", "/bin/sh", "-c", FAMILY],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    left = carriers(cookie.encode())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert done.returncode == 3, done.stderr
    assert left == []
    assert "rank 0 failed first" in done.stderr


def carriers(entry):
    """Return the processes that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("space", [NO_PROCESSES, OTHERS_PROCESSES])
def test_nothing_starts_where_proc_does_not_show_the_processes(tmp_path, space):
    # Without it nobody can find what the ranks leave behind.
    program = ("/bin/sh", "-c", "touch started; setsid sleep 1000 &")
    run = (sys.executable, "-m", "ronde", "run", "-n", "2", "--chdir", str(tmp_path))
    done = in_sandbox(*run, "--", *program, space=space)
    assert done.returncode == 64
    assert done.stderr.startswith("ronde: /proc belongs to another pid namespace")
    assert done.stderr.endswith(" Type: mount -t proc proc /proc\n")
    assert not list(tmp_path.iterdir())


def limit_open_files(soft, hard):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("limit", "size", "said"),
    [
        (12, 2, "must be at least 24 to run a job, got 12. Type: ulimit -n 4096"),
        (40, 10, "must be at least 64 for 10 ranks on a host, got 40. Type: ulimit -n"),
    ],
)
def test_too_few_open_files_are_told_before_anything_starts(
    ronde, tmp_path, limit, size, said
):
    words = ("run", "-n", str(size), "/usr/bin/touch", str(tmp_path / "started"))
    done = ronde(*words, preexec_fn=limit_open_files(limit, limit))
    assert done.returncode == 64
    assert done.stderr.startswith(b"ronde: limit of open files " + said.encode())
    assert done.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())


def test_many_hosts_need_no_higher_limit_of_open_files(ronde):
    hosts = ",".join(f"n{number}.invalid" for number in range(24))
    done = ronde("run", "-H", hosts, "true", preexec_fn=limit_open_files(40, 400))
    assert done.returncode == 69
    assert b"open files" not in done.stderr.lower()


@pytest.mark.parametrize("limit", [1, 3, 6])
def test_too_few_processes_are_told_and_none_is_left(limit):
    # Of a user of its own, whose processes alone count, and who may read Python.
    capability = "+dac_read_search"
    user = ("setpriv", "--reuid", "61234", "--clear-groups")
    space = (*user, "--inh-caps", capability, "--ambient-caps", capability)
    program = (sys.executable, "-m", "ronde", "run", "-n", "4", "sleep", "1000")
    done = in_sandbox("prlimit", f"--nproc={limit}", *program, space=space)
    assert done.returncode == 70
    text = f"limit of processes of this user is reached: {limit} (ulimit -u). Raise"
    assert done.stderr.startswith(f"ronde: {text}")
    assert done.stderr.count("\n") == 1
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError):
            left += [path] if path.stat().st_uid == 61234 else []
    assert not left
