"""Time all_reduce of float32, in place, against Gloo, Open MPI and MPICH.

``python benchmarks/collectives.py`` starts one group of ranks a peer and keeps all of
them: while one group is measured, the others block on a socket. In every round each
size is measured for each peer, in an order that changes, so that a machine that slows
down slows all of them. Times are the slowest rank's; figures are medians over rounds,
and so are ratios, of the rounds' own ratios. Every size is first checked for the right
result.

Peers: ``shared_memory`` with a buffer of the engine's own, ``shared_memory-foreign``
with a plain tensor; ``gloo`` is ronde's engine, ``torch_gloo`` plain
``torch.distributed.all_reduce``; ``openmpi`` and ``mpich`` are mpi4py's ``Allreduce``
on buffers. MPICH needs a Python of its own, with numpy, mpi4py and mpich:
``--mpich-python PATH``, or ``--install-mpich`` to make one for this run.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from ronde.launch.environments import base_environment, own_environment
from ronde.records import Record, append_record
from ronde.units import format_size

OURS = ("shared_memory", "shared_memory-foreign")
GLOO = ("gloo", "torch_gloo")
PEERS = (*OURS, *GLOO, "openmpi", "mpich")
SIZES = tuple(4 << shift for shift in range(0, 25, 2))
START_S = 120.0
MPICH_PACKAGES = ("mpich", "mpi4py>=4", "numpy")
KIB, MIB = 1 << 10, 1 << 20

# The goal: the speed-up over the best other, from a size on, where
# two ranks have a core each.
BARS = {
    "shared_memory": (
        (16 * KIB, 1.0),
        (256 * KIB, 3.0),
        (4 * MIB + 1, 1.0),
        (64 * MIB, 4.0),
    ),
    "shared_memory-foreign": ((64 * KIB, 1.0),),
}
SMALLEST_BAR_S = 15e-6


@dataclass
class Group:
    """The ranks of one peer and their measurements."""

    name: str
    process: "subprocess.Popen[bytes]"
    ranks: list[Connection]
    library: str
    times_s: dict[int, list[float]] = field(default_factory=dict)

    def ask(self, *order: object) -> list[Any]:
        """Have every rank do the same; return their answers."""
        for rank in self.ranks:
            rank.send(order)
        return [rank.recv() for rank in self.ranks]

    def time(self, size: int, num_iterations: int) -> float:
        """Return the seconds of one reduction, the slowest rank's."""
        return max(self.ask("time", size // 4, num_iterations))

    def median_s(self, size: int) -> float:
        """Return the median over rounds."""
        return statistics.median(self.times_s[size])

    def close(self) -> None:
        """End the ranks: they leave when their socket closes."""
        for rank in self.ranks:
            rank.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait()


def command_of(name: str, ranks: int, mpich_python: str) -> list[str]:
    if name == "mpich":
        mpiexec = str(Path(mpich_python).parent / "mpiexec")
        return [mpiexec, "-n", str(ranks), mpich_python]
    if name == "openmpi":
        mpirun = str(Path(sys.executable).parent / "mpirun")
        # On as many cores as ranks Open MPI binds: its own best.
        is_many = ranks > len(os.sched_getaffinity(0))
        more = ["--oversubscribe"] if is_many else []
        return [mpirun, "-n", str(ranks), *more, "--allow-run-as-root", sys.executable]
    ronde = [sys.executable, "-m", "ronde", "run", "--no-prefix", "-n", str(ranks)]
    return [*ronde, "--", sys.executable]


def start(name: str, folder: str, options: argparse.Namespace) -> Group | None:
    """Start the ranks of a peer; None, aloud, where that fails."""
    address = f"{folder}/{name}"
    env = base_environment(own_environment())
    env["OMP_NUM_THREADS"] = "1"
    program = str(Path(__file__).parent / "collective_peers.py")
    command = command_of(name, options.ranks, options.mpich_python)
    with Listener(address, "AF_UNIX", backlog=options.ranks) as listener:
        process = subprocess.Popen(
            [*command, program, name, address, str(max(options.sizes) // 4)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            ranks = [accept(listener, process) for _ in range(options.ranks)]
            connected = sorted(
                [(rank.recv(), rank) for rank in ranks], key=lambda pair: pair[0][1]
            )
        except (TimeoutError, EOFError, OSError):
            process.terminate()
            process.wait()
            print(f"{name} is left out: it does not start")
            return None
    return Group(name, process, [rank for _, rank in connected], connected[0][0][2])


def accept(listener: Listener, process: "subprocess.Popen[bytes]") -> Connection:
    """Wait for one rank; raise TimeoutError when it has ended or takes too long."""
    listener._listener._socket.settimeout(0.5)  # noqa: SLF001  there is no other way
    ends_at = time.monotonic() + START_S
    while True:
        try:
            return listener.accept()
        except TimeoutError:
            if process.poll() is not None or time.monotonic() > ends_at:
                raise


@contextmanager
def all_groups(options: argparse.Namespace) -> Generator[list[Group]]:
    """Start every peer; end all of them."""
    groups: list[Group] = []
    with tempfile.TemporaryDirectory(prefix="ronde-peers-") as folder:
        if options.install_mpich:
            options.mpich_python = install_mpich(f"{folder}/mpich-python")
        try:
            for name in options.peers:
                if name == "mpich" and not options.mpich_python:
                    print("mpich is left out: give --mpich-python or --install-mpich")
                elif (group := start(name, folder, options)) is not None:
                    groups.append(group)
            yield groups
        finally:
            for group in groups:
                group.close()


def install_mpich(folder: str) -> str:
    """Make an environment with MPICH; return its Python."""
    venv.create(folder, with_pip=True)
    python = f"{folder}/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *MPICH_PACKAGES], check=True)
    return python


def measure(groups: Sequence[Group], options: argparse.Namespace) -> None:
    """Check every size once, then time all of them in every round."""
    counts: dict[tuple[str, int], int] = {}
    for size in options.sizes:
        for group in groups:
            if not all(group.ask("check", size // 4)):
                raise SystemExit(f"{group.name}: wrong result at {format_size(size)}")
            group.times_s[size] = []
            once_s = group.time(size, 3)
            budget = options.seconds / group.time(size, max(3, int(0.01 / once_s)))
            counts[group.name, size] = max(5, int(budget))
    order = random.Random(0)
    for _ in range(options.rounds):
        for size in options.sizes:
            for group in order.sample(groups, len(groups)):
                num_iterations = counts[group.name, size]
                group.times_s[size].append(group.time(size, num_iterations))


def copy_bandwidth(group: Group, num_bytes: int) -> float:
    """Return bytes read and written a second by all ranks at once, the median of 5."""
    return statistics.median(
        len(group.ranks) * min(group.ask("copy", num_bytes, 3)) for _ in range(5)
    )


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return all_reduce's bus bandwidth in GB/s."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def ratio(ours: Group, others: Sequence[Group], size: int) -> float:
    """Return the speed-up of one over the best of the others, the rounds' median."""
    best = min(others, key=lambda group: group.median_s(size))
    pairs = zip(best.times_s[size], ours.times_s[size], strict=True)
    return statistics.median(other / own for other, own in pairs)


def print_table(groups: Sequence[Group], options: argparse.Namespace) -> None:
    """Print time and bus bandwidth of each peer, and our ratio to the best other."""
    ours = [group for group in groups if group.name in OURS]
    others = [group for group in groups if group.name not in OURS]
    print(f"\nall_reduce, float32, in place, {options.ranks} ranks: us (busbw in GB/s)")
    names = [f"{group.name:>22}" for group in groups]
    against = [f"{'x best: ' + group.name:>30}" for group in ours if others]
    print(f"{'size':>8}" + "".join(names + against))
    for size in options.sizes:
        cells = [f"{format_size(size):>8}"]
        for group in groups:
            seconds = group.median_s(size)
            busbw = bus_bandwidth(size, seconds, options.ranks)
            cells.append(f"{seconds * 1e6:>13.1f} ({busbw:6.2f})")
        cells += [f"{ratio(group, others, size):>30.2f}" for group in ours if others]
        print("".join(cells))


def bar_of(name: str, size: int, ranks: int) -> float:
    """Return the speed-up that is the goal; 0 without a goal."""
    if ranks > 2:
        return 1.0
    return next((b for least, b in reversed(BARS[name]) if size >= least), 0.0)


def print_bars(groups: Sequence[Group], options: argparse.Namespace) -> None:
    """Print the sizes that miss their goal: above 2 ranks, against Gloo."""
    rivals = [
        group
        for group in groups
        if group.name in GLOO or (options.ranks == 2 and group.name not in OURS)
    ]
    print()
    for group in groups:
        if group.name not in OURS or not rivals:
            continue
        missed: list[str] = []
        for size in options.sizes:
            got, bar = (
                ratio(group, rivals, size),
                bar_of(group.name, size, options.ranks),
            )
            if got < bar:
                missed.append(f"{got:.2f} of {bar:g} at {format_size(size)}")
        smallest_s = group.median_s(min(options.sizes))
        if options.ranks == 2 and smallest_s > SMALLEST_BAR_S:
            missed.append(f"{smallest_s * 1e6:.1f} us of 15 us at 4 B")
        verdict = f"missed: {', '.join(missed)}" if missed else "every bar is kept"
        print(f"{group.name}: {verdict}")


def print_bound(groups: Sequence[Group], options: argparse.Namespace) -> float:
    """Measure the copy bandwidth; print the largest size's share of its bound."""
    ranks, size = options.ranks, max(options.sizes)
    bandwidth = copy_bandwidth(groups[0], options.copy_mib * MIB) / 1e9
    bound = bandwidth * (ranks - 1) / ranks**2
    print(
        f"\ncopy by all ranks at once: {bandwidth:.1f} GB/s read and written; bound of "
        f"busbw M(n-1)/n^2 = {bound:.2f} GB/s"
    )
    for group in groups:
        busbw = bus_bandwidth(size, group.median_s(size), ranks)
        print(f"{group.name:>22} at {format_size(size)}: {busbw / bound:6.1%} of it")
    return bandwidth


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=7, help="at least 5 for a figure to quote")
    add("--seconds", type=float, default=0.05, help="of one measurement")
    add("--max-size", type=int, default=max(SIZES), help="in bytes")
    add("--peers", default=",".join(PEERS), help="of " + ",".join(PEERS))
    add("--mpich-python", default="", metavar="PATH")
    add("--install-mpich", action="store_true")
    add("--copy-mib", type=int, default=256, help="of one rank's copy")
    add("--json", default="", metavar="FILE", help="append a record")
    options = parser.parse_args(words)
    options.sizes = [size for size in SIZES if size <= options.max_size]
    options.peers = options.peers.split(",")
    unknown = set(options.peers) - set(PEERS)
    if unknown or not options.sizes or options.ranks < 2 or options.rounds < 1:
        parser.error("peers must be known, and ranks 2, rounds 1, max-size 4 at least")
    return options


def main() -> None:
    """Measure, print, and append a record."""
    options = parse()
    with all_groups(options) as groups:
        if not groups:
            raise SystemExit("no peer starts")
        for group in groups:
            print(f"{group.name} is up. {group.library}")
        measure(groups, options)
        print_table(groups, options)
        print_bars(groups, options)
        bandwidth = print_bound(groups, options)
    if options.json:
        values = {
            "collective": "all_reduce",
            "dtype": "float32",
            "ranks": options.ranks,
            "copy_gb_per_s": bandwidth,
            "libraries": {group.name: group.library for group in groups},
            "times_us": {
                group.name: {
                    str(size): [second * 1e6 for second in seconds]
                    for size, seconds in group.times_s.items()
                }
                for group in groups
            },
        }
        append_record(Path(options.json), Record("collectives", values))


if __name__ == "__main__":
    main()
