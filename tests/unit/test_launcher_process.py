"""Which process launched a rank, also while wrappers between the two end."""

import os
import subprocess
import sys

from tests.limits import HANG_S

from ronde.launch import own_environment

WRAPPERS_THAT_END = """
import ctypes, os, random, signal
from ronde.collectives import find_launcher
from ronde.world import RankInfo, Launcher

info = RankInfo(Launcher.PLAIN, 7, 8, 7, 8)
launcher = find_launcher(info)
ctypes.CDLL(None).prctl(36, 1)  # a subreaper: orphans stay below this process
first, wrappers = os.getpid(), []
read, write = os.pipe()
while len(wrappers) < 50 and not os.fork():
    wrappers.append(os.getpid())
    os.write(write, os.getpid().to_bytes(4, "little"))
if len(wrappers) == 50:
    while os.getppid() != first:
        assert find_launcher(info) == launcher
    os._exit(0)
if wrappers:
    signal.pause()
pids = [int.from_bytes(os.read(read, 4), "little") for _ in range(50)]
*others, rank = pids
for pid in random.sample(others, len(others)):
    os.kill(pid, signal.SIGKILL)
codes = {}
while len(codes) < 50:
    pid, status = os.wait()
    codes[pid] = os.waitstatus_to_exitcode(status)
print(launcher[0], codes[rank])
"""


def test_wrappers_may_end_meanwhile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPERS_THAT_END],
        env=own_environment() | {"RANK": "7"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{os.getpid()} 0\n", "")
