"""Measure the time from the fault of a rank to the message that names it.

Run it as ``python benchmarks/fault_times.py``; without a framework its front end is
left out. Rank 1 of 2 is killed or stopped while it is in an allreduce: of torch, in a
function of TensorFlow, in a jitted function of JAX. Rank 0 then calls it, too. The
error of that call names the killed rank; a warning of rank 0 names the stopped one.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

FAULTS = {
    "killed": (signal.SIGKILL, "Rank 1 is gone: rank 1, .* ended"),
    "stopped": (signal.SIGSTOP, "All ranks wait for rank 1, .* is stopped"),
}
FRONT_ENDS = ("torch", "tensorflow", "jax")
Module = Any  # a front end
NUM_ELEMENTS = 1 << 18


def make_call(framework: str, hvd: Module) -> Callable[[], object]:
    module = import_module(framework)
    if framework == "jax":
        compiled = module.jit(lambda x: hvd.allreduce(x, name="lasting"))
        array = module.numpy.ones(NUM_ELEMENTS)
        return lambda: compiled(array).block_until_ready()
    tensor = module.ones(NUM_ELEMENTS)
    compile_ = module.function if framework == "tensorflow" else lambda call: call
    return compile_(lambda: hvd.allreduce(tensor, name="lasting"))


def be_rank(framework: str, number: int) -> None:
    hvd = import_module(f"ronde.{framework}")
    hvd.init()
    call = make_call(framework, hvd)
    call()
    pid = hvd.allgather_object(os.getpid())[1]
    if hvd.rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to print the error
        time.sleep(1.0)  # rank 1 is in the call then
        print(f"fault {time.time()} {pid}", flush=True)
        os.kill(pid, number)
    call()


def measure(framework: str, fault: str) -> tuple[float, str]:
    """Return the seconds to the message that names rank 1, and the message."""
    launch = [sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix"]
    words = [*launch, sys.executable, __file__, "--rank", framework, fault]
    start_s, pid, found = 0.0, 0, (0.0, "no message")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        for line in job.stdout or ():
            if begun := re.match(r"fault (\d+\.\d+) (\d+)", line):
                start_s, pid = float(begun[1]), int(begun[2])
            message = re.search(FAULTS[fault][1], line)
            if message and not found[0]:
                found = (time.time() - start_s, message[0])
                if fault == "stopped":
                    os.kill(pid, signal.SIGKILL)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.rank[0], FAULTS[options.rank[1]][0])
        return
    for framework in filter(find_spec, FRONT_ENDS):
        for fault in FAULTS:
            rounds = [measure(framework, fault) for _ in range(options.rounds)]
            figures = " ".join(f"{seconds:.2f}" for seconds, _ in rounds)
            print(f"{framework:11} {fault:8} {figures} s: {rounds[-1][1]}", flush=True)


if __name__ == "__main__":
    main()
