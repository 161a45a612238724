"""A rank that spins until it was sampled, and then for about a second more.

A word ``N:M:kill`` kills rank M in start N then. ``stay`` spins for good.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from ronde.launch import own_environment


def spin():
    for _ in range(2_000_000):  # spins
        pass


def is_sampled():
    own = f"--pid\0{os.getpid()}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if own in path.read_bytes():
                return True
    return False


while not is_sampled():
    spin()
for _ in range(12):
    spin()
sys.stdout.write("sampled\n")
sys.stdout.flush()
environ = own_environment()
if f"{environ['RONDE_EPOCH']}:{environ['RANK']}:kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
while "stay" in sys.argv:
    spin()
