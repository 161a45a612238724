"""The memory of a step stays with a CPU rank, within bounds and if the user agrees."""

import resource
import shutil
import subprocess
import sys

import pytest
from tests.cli.conftest import clean_environment
from tests.limits import HANG_S

import ronde.torch as hvd
from ronde.memory import MallocThresholds, malloc_thresholds
from ronde.world import read_malloc_tuning

MIB = 1 << 20
NUM_STEPS = 32
NUM_PAGES = NUM_STEPS * 36 * MIB // resource.getpagesize()
"""Of the gradients of all steps, which are what faults where memory is given back."""
FAULTS = f"""
import resource, torch
def count_faults():
    torch.set_num_threads(1)
    layer, rows = torch.nn.Linear(3072, 3072, bias=False), torch.ones(2, 3072)
    # Where the heap begins decides how often it grows before each size has its place: a
    # step or two may still fault then.
    for step in range({NUM_STEPS} + 20):
        if step == 20:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        layer.zero_grad()
        layer(rows).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
if malloc_thresholds(4) is None:
    pytest.skip("no glibc here, or too little memory", allow_module_level=True)


def count_of_rank(info):
    del info
    hvd.init()
    try:
        names = {}
        exec(FAULTS, names)  # noqa: S102  the words that other processes get, too
        return names["count_faults"]()
    finally:
        hvd.shutdown()


def variables_of_job(ronde, **env):
    """Return the allocator's variables that the first of two ranks has."""
    words = ("run", "-n", "2", "--only", "0", "--no-prefix", "env")
    done = ronde(*words, env=env)
    assert done.returncode == 0, done.stderr.decode()
    lines = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    return {name: text for name, text in lines.items() if name.startswith("MALLOC_")}


def test_init_has_every_rank_keep_it(run_ranks_bare):
    counts = run_ranks_bare(3, count_of_rank, launcher="plain")
    assert max(counts) < NUM_PAGES / 4


def test_the_launcher_has_every_rank_keep_it(ronde):
    """Also in programs that know nothing of ronde."""
    program = (sys.executable, "-c", f"{FAULTS}\nprint(count_faults())")
    done = ronde("run", "-n", "1", "--no-prefix", "--", *program)
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < NUM_PAGES / 4


def test_the_user_can_have_it_given_back(ronde, run_ranks_bare):
    env = {"RONDE_MALLOC_TUNING": "0"}
    (count,) = run_ranks_bare(1, count_of_rank, launcher="plain", environment=env)
    assert count >= NUM_PAGES
    assert variables_of_job(ronde, **env) == {}


def test_the_users_own_tuning_counts():
    assert (
        read_malloc_tuning({"MALLOC_PERTURB": "", "RONDE_MALLOC_TUNING": "1"}) is False
    )
    assert read_malloc_tuning({"MALLOC_ARENA_MAX": "2"}) is False
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}
    assert read_malloc_tuning(tunables) is False
    assert read_malloc_tuning({"GLIBC_TUNABLES": "glibc.rtld.nns=8"}) is True


HOLD = """
import ctypes, sys
from pathlib import Path
from ronde.memory import MallocThresholds
MallocThresholds(int(sys.argv[1]), int(sys.argv[2])).apply()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def held_mib():
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmRSS"))
    return int(line.split()[1]) >> 10
before = held_mib()
blocks = [libc.malloc(int(sys.argv[3])) for _ in range(8)]
for block in blocks:
    ctypes.memset(block, 1, int(sys.argv[3]))
most = held_mib()
for block in reversed(blocks):
    libc.free(ctypes.c_void_p(block))
print(most - before, held_mib() - before)
"""


def held_after(*sizes_mib, **env):
    """Return MiB at the most and after all is freed; the process sets thresholds."""
    sizes = [str(mib * MIB) for mib in sizes_mib]
    command = [sys.executable, "-c", HOLD, *sizes]
    env = clean_environment("PYTHONPATH") | env
    done = subprocess.run(
        command, env=env, capture_output=True, timeout=HANG_S, check=True
    )
    return map(int, done.stdout.split())


# What is between the program and glibc's allocator: were that tuned, one would see it.
SHIM = "void *__libc_malloc(unsigned long); "
SHIM += "void *malloc(unsigned long size) { return __libc_malloc(size); }"


def test_another_allocator_is_left_alone(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make another allocator with")
    library = tmp_path / "allocator.so"
    words = [compiler, "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
    subprocess.run(words, input=SHIM.encode(), check=True, timeout=HANG_S)
    most_mib, left_mib = held_after(512, 64, 32, LD_PRELOAD=str(library))
    assert most_mib >= 8 * 32
    assert left_mib <= 150


def test_what_has_too_little_or_another_library_is_left_alone(tmp_path):
    assert malloc_thresholds(1, tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 4194304 kB\n")
    assert malloc_thresholds(4, tmp_path) == MallocThresholds(512 * MIB, 128 * MIB)
    assert malloc_thresholds(16, tmp_path) == MallocThresholds(128 * MIB, 32 * MIB)
    assert malloc_thresholds(17, tmp_path) is None
