import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.limits import HANG_S

from ronde.launch import KernelDiagnostics, core_file


def ends(evidence, code, cwd):
    """Let a process do something and return what is said of its end."""
    command = [sys.executable, "-I", "-S", "-c", f"import os, resource\n{code}"]
    process = subprocess.Popen(command, cwd=cwd)
    _, wait_status = os.waitpid(process.pid, 0)
    status = process.returncode = os.waitstatus_to_exitcode(wait_status)
    said = evidence.explain(status, wait_status, process.pid, str(cwd))
    return status, said, process.pid


def kill_self(number):
    return f"os.kill(os.getpid(), {int(number)})"


CORE = """
limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
"""


@pytest.fixture
def evidence():
    made = KernelDiagnostics()
    yield made
    made.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_a_plain_exit_has_no_evidence(evidence, tmp_path, number):
    assert ends(evidence, kill_self(number), tmp_path)[:2] == (-number, "")
    assert ends(evidence, "os._exit(0)", tmp_path)[:2] == (0, "")
    assert ends(evidence, "os._exit(7)", tmp_path)[:2] == (7, "")


def test_the_core_file_is_named(evidence, tmp_path):
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|"):
        pytest.skip(f"this kernel hands core files to {pattern}")
    if "/" in pattern:
        pytest.skip(f"this kernel writes core files to {pattern}")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no core files may be written here")
    status, said, _ = ends(evidence, CORE + kill_self(signal.SIGABRT), tmp_path)
    (core,) = tmp_path.iterdir()
    assert status == -signal.SIGABRT
    named = said.removeprefix(f"core dumped to {tmp_path}/")
    assert list(tmp_path.glob(named)) == [core]


def test_the_kernel_log_of_a_crash_is_reported(evidence, tmp_path):
    if not has_kernel_log():
        pytest.skip("the kernel's log is not to be read here")
    status, said, pid = ends(evidence, "import ctypes; ctypes.string_at(1)", tmp_path)
    assert status == -signal.SIGSEGV
    assert said.startswith("kernel log: ")
    assert f"[{pid}]: segfault at 1 " in said


def has_kernel_log():
    exists = Path("/proc/sys/debug/exception-trace")
    if str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]":
        return False
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        return exists.read_text().strip() == "1"
    except OSError:
        return False


def test_a_bus_error_tells_how_full_shared_memory_is(evidence, tmp_path):
    room = os.statvfs("/dev/shm")  # noqa: S108
    said = ends(evidence, kill_self(signal.SIGBUS), tmp_path)[1]
    is_small = room.f_blocks * room.f_frsize <= 1 << 30
    is_full = room.f_bavail * 20 <= room.f_blocks
    assert said.startswith("/dev/shm has ") is (is_small or is_full)  # noqa: S108


# Runs inside of a group of its own, as an agent does; its children are the ranks.
OOM = """
import os, sys
sys.path.insert(0, sys.argv[2])
from ronde.launch import KernelDiagnostics
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
evidence = KernelDiagnostics()
def end(act):
    pid = os.fork()
    if not pid:
        act()
        os._exit(5)
    _, wait_status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    print(status, evidence.explain(status, wait_status, pid, "/"), flush=True)
end(lambda: os.kill(os.getpid(), 9))
end(lambda: bytearray(256 << 20))
end(lambda: os.kill(os.getpid(), 9))
def lose_a_child():
    pid = os.fork()
    if not pid:
        bytearray(256 << 20)
    os.waitpid(pid, 0)
end(lose_a_child)
"""


@pytest.fixture
def small_group():
    """Make a control group that may have 64 MiB."""
    path = Path(f"/sys/fs/cgroup/memory/ronde-test-{os.getpid()}")
    limit = path / "memory.limit_in_bytes"
    if not path.parent.is_dir():
        path = Path(f"/sys/fs/cgroup/ronde-test-{os.getpid()}")
        limit = path / "memory.max"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        if not limit.exists():
            pytest.skip("control groups do not limit memory here")
        limit.write_text(str(64 << 20))
        yield path
    finally:
        path.rmdir()


def test_only_oom_kills_are_reported_as_such(small_group):
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", OOM, str(small_group), str(source)],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stderr == b""
    plain, killed, later, parent = done.stdout.decode().splitlines()
    assert plain == "-9 "
    assert killed in {
        "-9 the kernel killed it for lack of memory (OOM)",
        "-9 the kernel killed it for lack of memory (OOM), it seems",
    }
    assert later == "-9 "
    assert parent == "5 the kernel killed a process of the job for lack of memory"


@given(st.text(st.sampled_from("%pPtesu.c/*")), st.integers(1, 1 << 22))
def test_a_core_pattern_holds_the_pid_and_stars_for_the_rest(pattern, pid):
    found = core_file(pattern, pid)
    assert found.count(str(pid)) >= pattern.replace("%%", "").count("%p")
    assert core_file("core.%p.%t", pid) == f"core.{pid}.*"
