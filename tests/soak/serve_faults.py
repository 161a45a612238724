"""Break the ranks of a front at random while it serves, and count wrong answers.

A front lives for some faults. Meanwhile requests come all the time, whose answers are
known; some are cancelled. For each fault: the seconds until the front knew, and until
the ranks were ready again. What must hold: every answer is equal, none is missing, no
process is left over, descriptors and memory of the front and of the ranks' parents are
flat. At the end of its life a front is drained, and a fault comes to that, too; and
another front is killed. No fault comes before each request has a token after the
fault before, since a request with three losses in a row is rightly refused.

A line for each front, with the seed that does the same again: ``--seed N --faults M``.
The last line is JSON. Exits with 1 if anything was wrong.

    python -m tests.soak.serve_faults --faults 300 --seed 1
"""

import argparse
import asyncio
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.limits import HANG_S
from tests.serve.faulty_engine import FOLDER, PACE, Orders, processes_with
from tests.serve.fronts import ENGINE, WatchedFront, tokens_of
from tests.serve.model import answer_to, random_requests
from tests.soak.figures import reset_signals, show

from ronde.launch import own_environment
from ronde.plain_values import from_plain
from ronde.processes import ProcessStat, read_process
from ronde.serve import (
    Flight,
    FrontOptions,
    InferenceRequest,
    ReplicaConfig,
    ReplicaOptions,
    ServingMetrics,
)

_LIFE = 20  # faults of one front
_MOST_OPEN = 16
_PAUSE_S = 0.02  # between requests, on average
_CANCELLED = 0.1  # of the requests
_GROWTH_MIB = 16.0
_TRIES = 100
_STORE = 1  # connection, which a parent opens when it needs it


class Engine(NamedTuple):
    """The model that is served, and requests with their answers."""

    config: ReplicaConfig
    pool: Sequence[tuple[InferenceRequest, list[int]]]
    pace_s: float


class Held(NamedTuple):
    """The descriptors and the memory of a process."""

    num_descriptors: int
    memory_mib: float

    @classmethod
    def of(cls, pid: int) -> "Held":
        text = Path(f"/proc/{pid}/status").read_text()
        kib = int(text.partition("RssAnon:")[2].split()[0])
        return cls(len(os.listdir(f"/proc/{pid}/fd")), kib / 1024)  # noqa: PTH208


@dataclass(slots=True)
class Results:
    """The figures of all faults, by name."""

    known_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    back_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    wrong: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    front: list[Held] = field(default_factory=list[Held])  # after each life
    parent_mib: float = 0.0  # the most that a parent grew by
    num_requests: int = 0
    num_tokens: int = 0
    num_losses: int = 0


class Life:
    """A front with its ranks, from its start to its end."""

    def __init__(
        self, engine: Engine, num_ranks: int, seed: int, folder: Path, results: Results
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.chance = random.Random(seed)
        self.size, self.orders = num_ranks, Orders(folder)
        self.is_paused = False
        self._engine, self._results = engine, results
        self._name = "start"
        self._words = f"seed {seed}, {num_ranks} ranks"
        self._first: dict[int, Held] = {}  # of the ranks' parents
        self._open: set[Flight] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        env = {FOLDER: str(folder), PACE: str(engine.pace_s)}
        options = ReplicaOptions(num_ranks, env=env, max_restarts=1 << 30)
        self.front = WatchedFront(
            engine.config, FrontOptions(), [options], ServingMetrics(), self._print
        )

    def _print(self, text: str) -> None:
        print(f"{self._words}: {text}", file=sys.stderr, flush=True)

    def wrong(self, text: str) -> None:
        self._results.wrong.setdefault(self._name, []).append(f"{self._words}: {text}")

    async def run(self, names: Sequence[str]) -> None:
        end = asyncio.create_task(self.front.run())
        ready = asyncio.create_task(self.front.until(lambda: self.front.readies))
        await asyncio.wait([end, ready], return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            self.wrong(f"the front did not start: {end.result()}")
            ready.cancel()
            return
        load = asyncio.create_task(self._load())
        if not names:
            await end
        for self._name in names:
            self._print(self._name)
            try:
                async with asyncio.timeout(HANG_S):
                    await self._break(FAULTS[self._name])
            except TimeoutError:
                health = self.front.health()
                self.wrong(f"hangs: {health}, {processes_with(self.orders.folder)}")
                break
        self._results.num_losses += len(self.front.losses)
        load.cancel()
        await self._end(end)

    async def _break(self, fault: "Fault") -> None:
        front, orders = self.front, self.orders
        (orders.folder / "acted").unlink(missing_ok=True)
        num_lost, num_ready = len(front.lost_s), len(front.ready_s)
        await asyncio.sleep(self.chance.uniform(0, 0.2))
        acted_s = await fault.act(self)
        if fault.is_loss:
            await front.until(lambda: len(front.lost_s) > num_lost)
            acted_s = acted_s or orders.acted_s() or front.lost_s[num_lost]
            self._add(self._results.known_s, front.lost_s[num_lost] - acted_s)
            await front.until(lambda: len(front.ready_s) > num_ready)
            await front.until(lambda: front.health().is_ready)
            self._add(self._results.back_s, front.ready_s[-1] - acted_s)
        orders.withdraw()
        orders.release()
        self.is_paused = False
        await front.until(lambda: all(f.num_losses < 2 for f in self._open))
        await self._expect(2 * self.size, "ronde.serve.rank")
        await self._judge_parents()

    def _add(self, figures: dict[str, list[float]], seconds: float) -> None:
        figures.setdefault(self._name, []).append(seconds)

    async def _judge_parents(self) -> None:
        """Compare what each parent holds with what it held after its first fault."""
        for rank in range(self.size):
            _, pid = self.orders.processes(rank)
            first = self._first.setdefault(pid, Held.of(pid))
            for _ in range(_TRIES):  # it opens a file now and then
                held = Held.of(pid)
                if held.num_descriptors <= first.num_descriptors + _STORE:
                    break
                await asyncio.sleep(0.01)
            else:
                self.wrong(f"descriptors of a parent: {first} {held}")
            growth = held.memory_mib - first.memory_mib
            self._results.parent_mib = max(self._results.parent_mib, growth)

    async def _expect(self, num: int, program: str = "") -> None:
        """Wait until only so many processes are left, or so many of a program."""
        while True:
            found = processes_with(self.orders.folder)
            if sum(not program or _program(pid) == program for pid in found) == num:
                return
            await asyncio.sleep(0.01)

    # Requests.

    async def _load(self) -> None:
        while True:
            if not self.is_paused and len(self._open) < _MOST_OPEN:
                self.submit()
            await asyncio.sleep(self.chance.expovariate(1 / _PAUSE_S))

    def submit(self) -> None:
        request, answer = self.chance.choice(self._engine.pool)
        flight = self.front.submit(request, key=self.chance.choice("abc"))
        self._open.add(flight)
        task = asyncio.create_task(self._follow(flight, request, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(
        self, flight: Flight, request: InferenceRequest, answer: list[int]
    ) -> None:
        """Check a request to its end."""
        is_whole = self.chance.random() >= _CANCELLED
        num = self.chance.randrange(len(answer) + 1)
        while not flight.is_over:
            await flight.more(len(flight.tokens))
            if not is_whole and len(flight.tokens) >= num:
                flight.cancel()
        self._open.discard(flight)
        self._results.num_requests += 1
        self._results.num_tokens += len(flight.tokens)
        made = tokens_of(flight)
        is_cut = flight.finish == "cancel" and not is_whole
        if flight.error or made != (answer[: len(made)] if is_cut else answer):
            found = f"{flight.finish} {flight.error} {made}, not {answer}"
            self.wrong(f"{request}: {found}")

    async def idle(self) -> None:
        """Wait until nothing is to do; requests come again after the fault."""
        self.is_paused = True
        await self.front.until(lambda: not self._open)

    # The end.

    async def _end(self, end: "asyncio.Task[int]") -> None:
        """Drain the front, while a fault comes to it; nothing may be left."""
        self._name = "killed in a drain"
        self._print(self._name)
        environment = Path(f"/proc/{self.orders.processes(0)[0]}/environ").read_bytes()
        store = environment.partition(b"RONDE_STORE=")[2].partition(b"\0")[0]
        try:
            async with asyncio.timeout(HANG_S):
                for _ in range(_MOST_OPEN):
                    self.submit()
                (self.orders.folder / "acted").unlink(missing_ok=True)
                num_lost = len(self.front.lost_s)
                steps = self.chance.randint(1, 20)
                self.orders.give(self.chance.randrange(self.size), "kill", steps=steps)
                await self.front.drain(HANG_S)
                if (acted_s := self.orders.acted_s()) and self.front.lost_s[num_lost:]:
                    self._add(self._results.known_s, self.front.lost_s[-1] - acted_s)
                if (code := await end) != 0:
                    self.wrong(f"the front has ended with {code}")
                ended_s = time.monotonic()
                await self._expect(0)
                self._name = "nothing left after the end"
                self._add(self._results.back_s, time.monotonic() - ended_s)
        except TimeoutError:
            self.wrong(f"hangs: {self.front.health()}")
            end.cancel()
            with suppress(asyncio.CancelledError):
                await end
        if self._open:
            self.wrong(f"{len(self._open)} requests never ended")
        if Path(os.fsdecode(store)).parent.exists():
            self.wrong(f"{store!r} is left")


def _program(pid: int) -> str:
    """Return the module that a process of Python runs."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[2].decode() if words[1:2] == [b"-m"] else ""
    return ""


# Faults. Each returns its time, or 0 if a rank notes that by itself.


def _order(kind: str, at: str = "step", most: int = 30) -> "Act":
    async def act(life: Life) -> float:
        first = 1 if kind == "token" else 0
        rank, steps = (
            life.chance.randrange(first, life.size),
            life.chance.randint(1, most),
        )
        life.orders.give(rank, kind, at, steps)
        return 0

    return act


def _signal(number: int, *, of_parent: bool = False, is_idle: bool = False) -> "Act":
    async def act(life: Life) -> float:
        if is_idle:
            await life.idle()
        rank = life.chance.randrange(life.size)
        os.kill(life.orders.processes(rank)[of_parent], number)
        return time.monotonic()

    return act


async def _kill_two(life: Life) -> float:
    for rank in life.chance.sample(range(life.size), 2):
        os.kill(life.orders.processes(rank)[0], signal.SIGKILL)
    return time.monotonic()


def _again(at: str) -> "Act":
    async def act(life: Life) -> float:
        kind = life.chance.choice(("kill", "raise", "stop"))
        life.orders.give(life.chance.randrange(life.size), kind, at)
        os.kill(life.orders.processes(life.chance.randrange(life.size))[0], 9)
        return time.monotonic()

    return act


async def _kill_launcher(life: Life) -> float:
    """Kill ``ronde run``, the oldest process of a replica."""
    found = [read_process(pid) for pid in processes_with(life.orders.folder)]
    oldest = min((p.started, p.pid) for p in found if isinstance(p, ProcessStat))
    os.kill(oldest[1], signal.SIGKILL)
    return time.monotonic()


def _stop_front(most_s: float, *, with_loss: bool = False) -> "Act":
    async def act(life: Life) -> float:
        stopped_s = life.chance.uniform(most_s / 4, most_s)
        command = f"sleep {stopped_s}; kill -CONT {os.getpid()}"
        with subprocess.Popen(["/bin/sh", "-c", command]):
            if with_loss:
                os.kill(life.orders.processes(0)[0], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)
        return time.monotonic()

    return act


async def _stop_parent(life: Life) -> float:
    """Stop a parent, and lose a worker."""
    rank, other = life.chance.randrange(life.size), life.chance.randrange(life.size)
    os.kill(life.orders.processes(rank)[1], signal.SIGSTOP)
    os.kill(life.orders.processes(other)[0], signal.SIGKILL)
    return time.monotonic()


Act = Callable[[Life], Awaitable[float]]


class Fault(NamedTuple):
    """A fault, and its share of all."""

    act: Act
    share: int = 2
    is_loss: bool = True
    is_long: bool = False


FAULTS = {
    "killed in a step": Fault(_order("kill"), 4),
    "killed as a request begins": Fault(_order("kill", "add"), 3),
    "killed at any moment": Fault(_signal(signal.SIGKILL), 4),
    "killed when idle": Fault(_signal(signal.SIGKILL, is_idle=True)),
    "two killed at once": Fault(_kill_two),
    "stopped in a step": Fault(_order("stop"), 3),
    "stopped when idle": Fault(_signal(signal.SIGSTOP, is_idle=True)),
    "exception": Fault(_order("raise")),
    "MemoryError": Fault(_order("memory")),
    "torch.OutOfMemoryError": Fault(_order("device")),
    "SIGSEGV": Fault(_order("crash")),
    "other token": Fault(_order("token"), 3),
    "lost again as it loads": Fault(_again("load")),
    "lost again before it is ready": Fault(_again("ready")),
    "parent killed": Fault(_signal(signal.SIGKILL, of_parent=True), 1),
    "parent killed when idle": Fault(
        _signal(signal.SIGKILL, of_parent=True, is_idle=True), 1
    ),
    "ronde run killed": Fault(_kill_launcher, 1),
    "front stopped": Fault(_stop_front(2), 1, is_loss=False),
    "front stopped, rank 0 killed": Fault(_stop_front(2, with_loss=True), 1),
    "front stopped for long": Fault(_stop_front(16), 1, is_loss=False, is_long=True),
    "parent stopped, a worker killed": Fault(_stop_parent, 1, is_long=True),
    "engine hangs": Fault(_order("hang"), 1, is_long=True),
}


_FRONT_KILLED = "nothing left after the front was killed"


def kill_front(num_ranks: int, seed: int, folder: Path) -> float:
    """Kill a front in another process; return the seconds until all is gone."""
    words = ("--victim", str(folder), "--ranks", str(num_ranks), "--seed", str(seed))
    env = own_environment() | {FOLDER: str(folder)}
    command = (sys.executable, "-m", "tests.soak.serve_faults", *words)
    with subprocess.Popen(command, env=env) as front:
        while not (folder / "worker-0").exists():
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 2))
        front.kill()
        killed_s, ends_s = time.monotonic(), time.monotonic() + HANG_S
        while processes_with(folder) and time.monotonic() < ends_s:
            time.sleep(0.01)
    return time.monotonic() - killed_s


def draw(chance: random.Random, num: int, options: argparse.Namespace) -> list[str]:
    names = [n for n, f in FAULTS.items() if not (options.quick and f.is_long)]
    names = [options.only] if options.only else names
    return chance.choices(names, [FAULTS[name].share for name in names], k=num)


def make_engine(options: argparse.Namespace) -> Engine:
    if options.engine == "toy":
        requests = random_requests(random.Random(options.seed), 200)
        config = ReplicaConfig("toy", engine=ENGINE)
        return Engine(config, [(each, answer_to(each)) for each in requests], 0.005)
    config = ReplicaConfig(
        options.model,
        engine="tests.soak.serve_model:make_engine",
        dtype="float64",
        max_requests=8,
    )
    command = (sys.executable, "-m", "tests.soak.serve_model", options.model)
    lines = subprocess.check_output([*command, "60", str(options.seed)], text=True)
    pool = [
        (from_plain(InferenceRequest, request), answer)
        for request, answer in map(json.loads, lines.splitlines())
    ]
    return Engine(config, pool, 0.0)


def judge(results: Results) -> None:
    """Compare what the front's process held after its first front and at the end."""
    first, last = results.front[0], results.front[-1]
    growth = last.memory_mib - first.memory_mib
    if last.num_descriptors > first.num_descriptors or growth > _GROWTH_MIB:
        results.wrong["the front grows"] = [f"{first} {last}"]


def _lives(options: argparse.Namespace) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the seed, the number of ranks and the faults of each front."""
    for number in range(0, options.faults, options.life):
        seed = options.seed + number // options.life
        num = min(options.life, options.faults - number)
        yield (
            seed,
            options.ranks or (2 + seed % 2 if options.engine == "toy" else 2),
            draw(random.Random(seed), num, options),
        )


async def run(options: argparse.Namespace, folder: Path, results: Results) -> None:
    engine = make_engine(options)
    for seed, num_ranks, names in _lives(options):
        life = Life(engine, num_ranks, seed, folder / str(seed), results)
        begun_s, killing = time.monotonic(), None
        if options.engine == "toy":
            where = folder / f"victim-{seed}"
            killing = asyncio.create_task(
                asyncio.to_thread(kill_front, num_ranks, seed, where)
            )
            if not options.quick:  # else at the same time
                await killing
        await life.run(names)
        took_s = time.monotonic() - begun_s
        gc.collect()
        results.front.append(Held.of(os.getpid()))
        print(
            f"seed {seed}, {num_ranks} ranks: {len(names)} faults, {took_s:.1f} s; "
            f"{results.front[-1]}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if killing is not None:
            took_s = await killing
            results.back_s.setdefault(_FRONT_KILLED, []).append(took_s)
            if took_s > HANG_S:
                results.wrong[_FRONT_KILLED] = [f"seed {seed}: processes are left"]
    judge(results)


async def be_victim(options: argparse.Namespace) -> None:
    """Serve until this process is killed."""
    folder = Path(options.victim)
    life = Life(make_engine(options), options.ranks, options.seed, folder, Results())
    await life.run([])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Break the ranks of a front.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--ranks", type=int, default=0, help="else 2, of the toy also 3"
    )
    parser.add_argument("--life", type=int, default=_LIFE, help="faults of one front")
    parser.add_argument("--only", metavar="NAME", choices=FAULTS, help="this fault")
    parser.add_argument("--engine", choices=("toy", "transformers"), default="toy")
    parser.add_argument("--model", metavar="FOLDER", help="of transformers")
    parser.add_argument("--victim", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes long"
    )
    return parser.parse_args()


def main() -> int:
    """Run all fronts and print the tables; return the exit code."""
    reset_signals()
    options = parse()
    if options.victim:
        asyncio.run(be_victim(options))
    folder, results = Path(tempfile.mkdtemp(prefix="serve-faults-")), Results()
    # Errors of ranks are part of the faults.
    own, log = os.dup(2), os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    sys.stderr = os.fdopen(own, "w", buffering=1)
    os.dup2(log, 2)
    os.close(log)
    asyncio.run(run(options, folder, results))
    wrong = results.wrong
    show("serve_faults: seconds until the front knew", results.known_s, {})
    is_good = show(
        "serve_faults: seconds until ready again",
        {name: [] for name in wrong} | results.back_s,
        wrong,
        requests=results.num_requests,
        tokens=results.num_tokens,
        losses=results.num_losses,
        front=[results.front[0], results.front[-1]],
        parent_mib=results.parent_mib,
    )
    if is_good:
        shutil.rmtree(folder)
    else:
        print(f"the ranks' errors are in {folder}/log", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
