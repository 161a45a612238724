"""The figures of a host: from saved trees, from this machine, and from a fake NVML."""

import json
import os
import subprocess
import sys
import threading

import pynvml
import pytest
from tests.check.nvml_fake import healthy, refusal
from tests.check.nvml_library import FakeLibrary, at
from tests.cli.conftest import Ronde
from tests.cli.test_ps import running
from tests.limits import HANG_S, until
from tests.monitor.jobs import make_table

from ronde.launch import HostAnswer, JobConnection
from ronde.monitor import (
    GpuReader,
    HangingReader,
    HostUsage,
    JobWatcher,
    NetworkCounters,
    UsageReader,
)
from ronde.plain_values import from_plain, to_plain

NOT_SUPPORTED, LOST, NO_DRIVER = 3, 15, 9
NET_HEAD = "Inter-|   Receive\n face |bytes\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def net_line(name, received, sent, errors=(0, 0)):
    counters = [received, 1, errors[0], *[9] * 5, sent, 1, errors[1], *[9] * 5]
    return f"{name}: {' '.join(map(str, counters))}\n"


def put_host(root):
    """Write the files of a host of 2 cores and 1000 KiB, without adapters."""
    write(
        root,
        {
            "proc/stat": "cpu  100 10 50 5000 40 3 2 5 60 7\ncpu0 0\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\n",
            "proc/vmstat": "oom_kill 4\n",
            "proc/net/dev": NET_HEAD + net_line("lo", 1, 1) + net_line("eth0", 70, 80),
        },
    )


def test_a_host_is_read_from_its_files(tmp_path):
    root = str(tmp_path)
    put_host(tmp_path)
    found = UsageReader(root).read({})
    assert found.cpu_s * os.sysconf("SC_CLK_TCK") == 170
    assert (found.memory_bytes, found.total_memory_bytes) == (600 << 10, 1000 << 10)
    assert found.num_oom_kills == 4
    assert found.interfaces == (NetworkCounters("eth0", 70, 80, 0, 0),)
    assert (found.gpus, found.gpu_problem) == ((), "")


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_its_own_memory_and_kills(tmp_path, version):
    put_host(tmp_path)
    group = "sys/fs/cgroup/job"
    if version == 2:
        line, files = "0::/job", ("memory.max", "memory.current", "memory.events")
        reclaimable = "inactive_file"
    else:
        line, group = "4:memory:/job", "sys/fs/cgroup/memory/job"
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
        reclaimable = "total_inactive_file"
    texts = ("500000\n", "300000\n", "low 0\noom_kill 2\noom_group_kill 1\n")
    own = {f"{group}/{name}": text for name, text in zip(files, texts, strict=True)}
    stat = {f"{group}/memory.stat": f"{reclaimable} 100000\n"}
    write(tmp_path, {"proc/self/cgroup": f"{line}\n", **own, **stat})
    found = UsageReader(str(tmp_path)).read({})
    assert (found.memory_bytes, found.total_memory_bytes) == (200_000, 500_000)
    assert found.num_oom_kills == 2


def test_adapters_and_ports_are_counted_once(tmp_path):
    """A bridge and IPoIB show bytes that their adapters count, too."""
    put_host(tmp_path)
    many = (net_line(f"veth{n}", 7, 8) for n in range(2000))  # longer than a read
    lines = [
        net_line("lo", 1, 1),
        *many,
        net_line("docker0", 70, 80),
        net_line("eth0", 70, 80, errors=(3, 4)),
        net_line("ib0", 5, 6),
    ]
    port, function = (f"sys/class/infiniband/mlx5_{n}" for n in range(2))
    own, other = f"{port}/ports/1", f"{function}/ports/1"
    write(
        tmp_path,
        {
            "proc/net/dev": NET_HEAD + "".join(lines),
            "sys/class/net/eth0/device/vendor": "",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/net/ib0/device/vendor": "",
            "sys/class/net/ib0/type": "32\n",
            f"{own}/rate": "400 Gb/sec (4X NDR)\n",
            f"{own}/counters/port_rcv_data": "1000\n",
            f"{own}/counters/port_xmit_data": "2000\n",
            f"{own}/counters/symbol_error": "5\n",
            f"{own}/counters/link_downed": "N/A\n",
            f"{other}/counters/port_rcv_data": "1\n",
            f"{other}/counters/port_xmit_data": "1\n",
            f"{function}/device/physfn/vendor": "",
            "sys/class/infiniband/mlx5_2/ports/1/rate": "no counters here",
        },
    )
    assert UsageReader(str(tmp_path)).read({}).interfaces == (
        NetworkCounters("eth0", 70, 80, 7, 100_000_000_000),
        NetworkCounters("mlx5_0:1", 4000, 8000, 5, 400_000_000_000),
    )


BUSY = """
import os, subprocess, sys, time
burn = "import time\\nwhile time.process_time() < 0.2: pass\\nprint(flush=True)\\n"
stay = burn + "import sys; sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
child = subprocess.Popen([sys.executable, "-c", stay], **pipes)
child.stdout.readline()
print(flush=True)
sys.stdin.readline()
child.kill()
child.wait()
print(flush=True)
sys.stdin.readline()
"""


def test_the_time_of_an_ended_child_stays_with_its_worker():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BUSY], **pipes) as process:
        reader = UsageReader()
        reader.read({7: process.pid})
        process.stdout.readline()
        both = reader.read({7: process.pid}).workers["7"]
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        alone = reader.read({7: process.pid}).workers["7"]
        process.kill()
    assert alone.cpu_s >= both.cpu_s >= 0.2
    assert alone.rss_bytes < both.rss_bytes
    assert reader.read({7: process.pid}).workers["7"] == (0, 0)


class UsageLibrary(FakeLibrary):
    """NVML with the questions of ``usage``; a hanging GPU waits for ``release``."""

    def __init__(self, record, **options):
        super().__init__(record, **options)
        self.release = threading.Event()

    def _gpu(self, device, question):
        if device.number in self._hanging:
            self.release.wait(HANG_S)
        return self._checked(self._record["gpus"][device.number][question])

    def DeviceGetPowerUsage(self, device, out):  # noqa: N802
        at(out).value = self._gpu(device, "milliwatts")

    def DeviceGetTemperature(self, device, sensor, out):  # noqa: N802
        at(out).value = self._gpu(device, "celsius")

    def DeviceGetClockInfo(self, device, domain, out):  # noqa: N802
        at(out).value = self._gpu(device, "mhz")

    def DeviceGetMaxClockInfo(self, device, domain, out):  # noqa: N802
        at(out).value = 1980


def record(**changes):
    figures = {"milliwatts": 650_500, "celsius": 61, "mhz": 1755}
    figures |= {"processes": [{"pid": 77, "memory_bytes": 1}], "busy_percent": 97}
    found = healthy(2, **figures | changes)
    found["gpus"][0] |= figures
    return found


@pytest.fixture
def open_library(monkeypatch, tmp_path):
    """Return a function that makes a library the one of pynvml, and a reader."""
    libraries = []

    def open_it(library):
        libraries.append(library)
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
        return GpuReader(str(tmp_path))

    yield open_it
    for each in libraries:
        each.release.set()


def test_gpus_are_read_through_pynvml(open_library):
    worn = record(
        milliwatts=refusal(NOT_SUPPORTED),
        clock_events=0x1 | 0x8 | 0x40,
        processes=refusal(NOT_SUPPORTED),
    )
    library = UsageLibrary(worn, missing=("nvmlDeviceGetMaxClockInfo",))
    reader = open_library(library)
    (first, second), problem = reader.read(HANG_S)
    assert problem == ""
    name, used, total = "NVIDIA H100 80GB HBM3", 0, 80 << 30
    assert first == (0, name, 0.97, used, total, 650.5, 61, 1755, None, (), (77,))
    assert (second.power_w, second.pids) == (None, ())
    assert second.throttled_by == ("HW slowdown", "HW thermal slowdown")
    worn["gpus"][1] = worn["gpus"][0]
    assert reader.read(HANG_S).gpus[1].power_w == 650.5


@pytest.mark.parametrize(
    ("options", "changes", "names", "problem"),
    [
        ({"gone": {0: LOST}}, {}, [1], "GPU 0 does not answer: "),
        ({}, {"titles": refusal(LOST)}, [0], "GPU 1 does not answer: "),
        ({"init_error": NO_DRIVER}, {}, [], "NVML does not answer: "),
    ],
)
def test_gpus_that_do_not_answer_are_named(
    open_library, options, changes, names, problem
):
    found = open_library(UsageLibrary(record(**changes), **options)).read(HANG_S)
    assert [gpu.number for gpu in found.gpus] == names
    assert found.problem.startswith(problem)


def test_a_missing_library_has_a_remedy_where_there_is_a_driver(
    open_library, monkeypatch, tmp_path
):
    reader = open_library(UsageLibrary(record()))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    text = "nvidia-ml-py is not installed there: pip install 'ronde[monitor]'"
    assert reader.read(HANG_S) == ((), text)
    assert GpuReader(str(tmp_path / "none")).read(HANG_S) == ((), "")


def test_a_call_that_hangs_stops_no_answer(open_library):
    library = UsageLibrary(record(), hanging=(1,))
    reader = open_library(library)
    num_threads = threading.active_count()
    for _ in range(3):
        gpus, problem = reader.read(0.01)
        assert gpus == ()
        assert problem.startswith("NVML has not answered for ")
    assert threading.active_count() == num_threads + 1
    library.release.set()
    assert len(reader.read(HANG_S).gpus) == 2


def test_an_older_result_is_there_while_a_call_hangs():
    begun, release = threading.Event(), threading.Event()
    results = iter("ab")

    def read():
        result = next(results)
        if result == "b":
            begun.set()
            release.wait(HANG_S)
        return result

    reader = HangingReader(read)
    first = reader.latest(HANG_S)
    second = reader.latest(0.01)
    begun.wait(HANG_S)
    assert (first.value, second.value) == ("a", "a")
    assert second.age_s > first.age_s
    release.set()
    until(lambda: reader.latest(HANG_S).value == "b")


HANGS = """
import signal, threading
from ronde.monitor import HangingReader
def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    signal.sigwait([signal.SIGALRM])
print(HangingReader(hang).latest(0.01).value, threading.active_count())
"""


def test_a_call_that_hangs_does_not_keep_a_process_from_ending():
    words = [sys.executable, "-c", HANGS]
    done = subprocess.run(words, capture_output=True, timeout=HANG_S, check=True)
    assert (done.stdout, done.stderr) == (b"None 2\n", b"")


def test_an_answer_survives_json_and_reaches_the_view():
    usage = UsageReader().read({0: os.getpid(), 1: os.getppid()})
    assert usage.workers["0"].rss_bytes > 0
    assert usage.shm_bytes <= usage.total_shm_bytes
    plain = json.loads(json.dumps(to_plain(usage)))
    assert from_plain(HostUsage, plain) == usage
    watcher = JobWatcher(make_table(2))
    watcher.add(HostAnswer("node0", plain))
    watcher.add(HostAnswer("node0", {"error": "something else"}))
    view = watcher.view()
    assert view.hosts[0].usage == usage._replace(workers={})
    assert view.ranks[0].rss_bytes == usage.workers["0"].rss_bytes


@pytest.mark.waits
def test_a_running_job_answers():
    words = ("-n", "2", "/bin/sleep", "1002")
    with running(Ronde(), *words) as (_, path), JobConnection(path) as job:
        job.send({"ask": "usage"})
        answer = next(news for news in job if isinstance(news, HostAnswer))
    found = from_plain(HostUsage, answer.answer)
    assert found.workers.keys() == {"0", "1"}
    assert all(each.rss_bytes > 0 for each in found.workers.values())
