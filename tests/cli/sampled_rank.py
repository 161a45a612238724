"""A rank that spins until it was sampled, and then for a second more.

A word ``N:M:kill`` kills rank M in start N then. ``stay`` spins for good.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from ronde.launch import own_environment


def spin(is_over):
    while not is_over():
        ends = time.monotonic() + 0.1
        while time.monotonic() < ends:  # spins
            pass


def is_sampled():
    own = f"--pid\0{os.getpid()}\0".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if own in path.read_bytes():
                return True
    return False


spin(is_sampled)
ends = time.monotonic() + 1.0
spin(lambda: time.monotonic() > ends)
sys.stdout.write("sampled\n")
sys.stdout.flush()
environ = own_environment()
if f"{environ['RONDE_EPOCH']}:{environ['RANK']}:kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
spin(lambda: "stay" not in sys.argv)
