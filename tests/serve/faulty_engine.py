"""Engines that fail by order, and the side that gives the orders.

A folder, which ranks find in their environment, has the orders. A rank that finds one
removes it, notes the time, and acts. Each worker writes its pid there.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from tests.limits import HANG_S, until
from tests.serve.model import CAPACITY, END, compute

from ronde.errors import UsageError
from ronde.launch import own_environment
from ronde.processes import read_process
from ronde.serve import StepEngine

FOLDER = "FAULT_FOLDER"
"""The variable that names the folder."""
PACE = "FAULT_PACE"
"""The variable with the seconds that each step takes in addition."""
POISON = (1, 2, 3)
"""Ends each rank whose request begins with it."""
REFUSAL = "engine must be served, got an order to refuse."
_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Orders:
    """The folder with the orders to the ranks of one replica."""

    folder: Path

    def give(self, rank: int, kind: str, at: str = "step", steps: int = 1) -> None:
        """Order a fault.

        ``at`` is "step", for the ``steps``-th step from now; "add", for the next
        request; "load", for the next ``steps`` workers as they start; or "ready", for
        the next worker once it has connected, but before the front knows.
        """
        self.write(f"{at}-{rank}", [kind, steps])

    def withdraw(self) -> None:
        for at in ("step", "add", "load", "ready"):
            for path in self.folder.glob(f"{at}-*"):
                path.unlink(missing_ok=True)

    def await_held(self, rank: int) -> None:
        until((self.folder / f"held-{rank}").exists, f"rank {rank} to be held")

    def release(self) -> None:
        """Let steps end that an order has held."""
        for path in self.folder.glob("held-*"):
            path.unlink()

    def processes(self, rank: int) -> tuple[int, int]:
        """Return the pids of a rank's newest worker and of its parent."""
        pid, parent = json.loads((self.folder / f"worker-{rank}").read_text())
        return pid, parent

    def acted_s(self) -> float | None:
        """Return the time of the newest fault, by the monotonic clock."""
        found = self.folder / "acted"
        return json.loads(found.read_text()) if found.exists() else None

    def write(self, name: str, value: object) -> None:
        draft = self.folder / f".{name}-{os.getpid()}"
        draft.write_text(json.dumps(value))
        draft.rename(self.folder / name)


def make_engine(_config: Any, info: Any) -> "FaultyEngine":
    engine = StepEngine(compute, compute, CAPACITY, (END,))
    return FaultyEngine(engine, info.rank)


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _do_nothing() -> None:
    pass


ACTIONS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "kill": _signal(signal.SIGKILL),
        "stop": _signal(signal.SIGSTOP),
        "crash": _signal(signal.SIGSEGV),
        "raise": lambda: _raise(ArithmeticError("of the engine")),
        "memory": lambda: _raise(MemoryError("no bytes are left")),
        "device": lambda: _raise(torch.OutOfMemoryError("no bytes are left")),
        "parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
        "hang": lambda: time.sleep(HANG_S),
        "refuse": lambda: _raise(UsageError(REFUSAL)),
        "hold": _do_nothing,  # see ``step``
        "token": _do_nothing,
    }
)


class FaultyEngine:
    """An engine with a rank's orders."""

    def __init__(self, own: Any, rank: int) -> None:
        environment = own_environment()
        self._own, self._rank = own, rank
        self._folder = Path(environment[FOLDER])
        self._pace_s = float(environment.get(PACE, "0"))
        self._orders = Orders(self._folder)
        self._kind, self._steps = "", 0
        self._orders.write(f"worker-{rank}", [os.getpid(), os.getppid()])
        self._act_at("load")
        self._is_new = True

    @property
    def capacity(self) -> Any:
        return self._own.capacity

    @property
    def has_work(self) -> bool:
        if self._is_new:
            self._is_new = False
            self._act_at("ready")
        return self._own.has_work

    def add(self, request: Any) -> None:
        if request.prompt[: len(POISON)] == POISON:
            ACTIONS["kill"]()
        self._act_at("add")
        self._own.add(request)

    def cancel(self, request_id: int) -> None:
        self._own.cancel(request_id)

    def step(self) -> list[Any]:
        time.sleep(self._pace_s)
        if not self._kind:
            self._kind, self._steps = self._find("step")
        self._steps -= 1
        kind = self._kind if self._steps <= 0 else ""
        if kind:
            self._kind = ""
            self._act(kind)
        made = self._own.step()
        if kind == "token" and made:
            first = made[0]
            made[0] = first._replace(token=(first.token + 1) % self.capacity.vocabulary)
        return made

    def _act_at(self, moment: str) -> None:
        kind, _ = self._find(moment)
        if kind:
            self._act(kind)

    def _find(self, moment: str) -> tuple[str, int]:
        path = self._folder / f"{moment}-{self._rank}"
        if not path.exists():
            return "", 0
        kind, steps = json.loads(path.read_text())
        path.unlink()
        if moment == "load" and steps > 1:
            self._orders.give(self._rank, kind, moment, steps - 1)
        return kind, steps

    def _act(self, kind: str) -> None:
        if kind == "hold":
            name = f"held-{self._rank}"
            self._orders.write(name, None)
            while (self._folder / name).exists():
                time.sleep(_POLL_S)
        self._orders.write("acted", time.monotonic())
        ACTIONS[kind]()


def processes_with(folder: Path) -> list[int]:
    """Return the processes that have this folder in their environment."""
    wanted = f"{FOLDER}={folder}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            has_it = wanted in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        process = read_process(int(path.name)) if has_it else None
        if process is not None and not process.is_zombie:
            found.append(process.pid)
    return found
