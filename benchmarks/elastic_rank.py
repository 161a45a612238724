"""The rank of ``elastic.py``: train an MLP, and note when each step was applied.

Notes go to ``$FOLDER/<pid>``, one line of JSON each: ``[at_s, step, view, rank, size]``
after ``optimizer.step()``, and ``["name", begin_s, end_s]`` for what else takes time.
A ``view`` is what torchft calls a quorum, and of a launcher that starts all ranks anew
it is the start. Times are ``time.monotonic()``'s, which one machine's processes share.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    import ronde.torch as hvd

WIDTHS = {2: (192, 96), 23: (1280, 704), 190: (4096, 3072)}
"""Of an MLP's layers, by the MB of its parameters and Adam's state."""

BATCH = 32  # a rank's
NUM_IMAGES = 4096
_REST_S, _POLL_S = 0.4, 0.02
_TRAINED_S = 0.5  # at full speed, before a rank joins
_MEASURED_STEP = 3  # of a view, in which its bandwidth is measured


class Notes:
    """The events of this process and their times."""

    def __init__(self) -> None:
        folder = Path(os.environ["FOLDER"])  # noqa: TID251  a rank's own
        path, self._rest = folder / str(os.getpid()), folder.with_name("rest")
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *values: float | str) -> None:
        """Write one line, whole; then sleep, if a new process needs the processor."""
        os.write(self._fd, f"{json.dumps(values)}\n".encode())
        if self._rest.exists():
            time.sleep(_REST_S)

    def watch(self, owner: Any, name: str) -> None:  # noqa: ANN401
        """Note when a function of a class or module is called and returns."""
        function = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:  # noqa: ANN401
            begin_s = time.monotonic()
            try:
                return function(*args, **more)
            finally:
                self.write(name.strip("_"), begin_s, time.monotonic())

        setattr(owner, name, watched)

    def watch_waiting(self) -> None:
        """Note when this process is ready to join; it waits until none has to rest."""
        from ronde.membership.member import Member
        from ronde.membership.view import NO_VIEW

        settle = Member.settle

        def watched(member: Member, step: int, reason: str = "") -> Any:  # noqa: ANN401
            if member.view.view == NO_VIEW:
                self.write(time.monotonic(), -1, -1, -1, -1)
                while self._rest.exists():
                    time.sleep(_POLL_S)
                time.sleep(_TRAINED_S)
            return settle(member, step, reason)

        Member.settle = watched


def make_mlp(state_mb: int) -> nn.Module:
    """Return an MLP with this many MB of parameters and Adam's state."""
    first, second = WIDTHS[state_mb]
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, first), nn.ReLU(),
        nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 10),
    )  # fmt: skip


def make_images(*shape: int) -> TensorDataset:
    """Return images of noise and their labels, equal on all ranks."""
    torch.manual_seed(1)
    labels = torch.randint(10, (NUM_IMAGES,))
    return TensorDataset(torch.randn(NUM_IMAGES, *(shape or (784,))), labels)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_elastic(notes: Notes, state_mb: int, size: int) -> None:
    """Train by ``hvd.elastic.Loop``, without end."""
    import ronde.torch as hvd
    from ronde.membership.member import Member, own_member
    from ronde.session import lifetime
    from ronde.torch.elastic.loop import Loop
    from ronde.torch.elastic.training import Training

    for owner, names in {
        lifetime: ("_break_off", "_connect"),
        Member: ("_end", "settle", "running"),
        Loop: ("_recover",),
        Training: ("broadcast",),
    }.items():
        for name in names:
            notes.watch(owner, name)
    notes.watch_waiting()
    hvd.init()
    member = own_member()
    if member is None:
        raise SystemExit("start this by ronde run --min-ranks")
    model = make_mlp(state_mb)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters()
    )
    elements = torch.zeros(sum(p.numel() for p in model.parameters()) * 3)
    data = make_images()
    view, num_steps = -1, 0
    for step in hvd.elastic.Loop(
        model, optimizer, data, batch=BATCH * size, epochs=10**9
    ):
        with step:
            num_steps = num_steps + 1 if member.view.view == view else 1
            view = member.view.view
            if num_steps == _MEASURED_STEP:
                hvd.barrier()
                begin_s = time.monotonic()
                hvd.broadcast_(elements, 0, name="bandwidth")
                notes.write("bandwidth", begin_s, time.monotonic())
            loss_of(model, step.inputs).backward()
            optimizer.step()
            at_s = time.monotonic()
            notes.write(at_s, step.number + 1, view, hvd.rank(), hvd.size())


def batches_of(data: TensorDataset, rank: int, size: int) -> Iterator[Any]:
    """Return this rank's batches, without end."""
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, BATCH, sampler=sampler)
    while True:
        yield from loader


def train_anew(notes: Notes, state_mb: int, _size: int) -> None:
    """Train by plain ``hvd``, from the beginning after every start of all ranks."""
    import ronde.torch as hvd

    hvd.init()
    model = make_mlp(state_mb)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    start = int(os.environ["RONDE_EPOCH"])  # noqa: TID251
    rank, size = hvd.rank(), hvd.size()
    for step, batch in enumerate(batches_of(make_images(), rank, size), 1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        notes.write(time.monotonic(), step, start, rank, size)


def train_ddp(notes: Notes, state_mb: int, _size: int) -> None:
    """Train by DDP under torchrun, from the beginning after every start."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = nn.parallel.DistributedDataParallel(make_mlp(state_mb))
    optimizer = torch.optim.Adam(model.parameters())
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])  # noqa: TID251
    for step, batch in enumerate(batches_of(make_images(), rank, size), 1):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        notes.write(time.monotonic(), step, start, rank, size)


def train_torchft(notes: Notes, state_mb: int, size: int) -> None:
    """Train as one of torchft's replica groups, of one rank."""
    import torchft
    from torch.distributed import TCPStore
    from torchft.ddp import PureDistributedDataParallel

    model = make_mlp(state_mb)
    optimizer = torch.optim.Adam(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"mlp_{os.getpid()}",
        hostname="localhost",
    )
    # Its other wrapper ends survivors by an AssertionError in its hook.
    replica = PureDistributedDataParallel(manager, model)
    managed = torchft.Optimizer(manager, optimizer)
    before = 0
    index = int(os.environ["RANK"])  # noqa: TID251
    for batch in batches_of(make_images(), index, size):
        managed.zero_grad()
        loss_of(replica, batch).backward()
        managed.step()
        step = manager.current_step()
        if step > before:
            at_s, quorum = time.monotonic(), manager._quorum_id  # noqa: SLF001
            notes.write(at_s, step, quorum, index, manager.num_participants())
        before = step


def measure_cost(notes: Notes, builds: int, rounds: int) -> None:
    """Time steps of a ``Loop`` and plain ones, by turns, of one model and optimizer.

    In a job that is not elastic, plain ones only.
    """
    from benchmarks.training_step import MODELS, STEPS_PER_ROUND

    import ronde.torch as hvd
    from ronde.membership.member import own_member

    hvd.init()
    is_elastic, chance = own_member() is not None, random.Random(0)
    for name in ("mlp", "mnist_cnn"):
        build, shape = MODELS[name]
        data = make_images(*shape[1:])
        for _ in range(builds):
            torch.manual_seed(0)
            model = build()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9),
                model.named_parameters(),
            )
            batch = shape[0] * hvd.size()
            loop = hvd.elastic.Loop(model, optimizer, data, batch=batch, epochs=10**9)
            sampler = DistributedSampler(data, hvd.size(), hvd.rank())
            loader = DataLoader(data, shape[0], sampler=sampler)
            steps = {"plain": partial(_step_plainly, model, optimizer, loader)}
            if is_elastic:
                steps["loop"] = partial(_step_elastically, model, optimizer, loop)
            times = _time_by_turns(steps, STEPS_PER_ROUND[name], rounds, chance)
            if hvd.rank() == 0:
                for variant, step_s in times.items():
                    notes.write(f"{name} {variant} {is_elastic:d}", *step_s)


def _time_by_turns(
    steps: dict[str, Callable[[], Iterator[None]]],
    num_steps: int,
    rounds: int,
    chance: random.Random,
) -> dict[str, list[float]]:
    """Return each variant's median step in each round, the slowest rank's."""
    import ronde.torch as hvd

    running = {name: make() for name, make in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in running}
    for index in range(rounds + 1):
        for name in chance.sample(list(running), len(running)):
            hvd.barrier()
            took_s: list[float] = []
            for _ in range(num_steps):
                begin_s = time.perf_counter()
                next(running[name])
                took_s.append(time.perf_counter() - begin_s)
            own = torch.tensor([statistics.median(took_s)], dtype=torch.float64)
            slowest = float(hvd.allreduce(own, op=hvd.Max))
            if index:  # the first warms up
                times[name].append(slowest)
    return times


def _step_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]
) -> Iterator[None]:
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            yield


def _step_elastically(
    model: nn.Module, optimizer: torch.optim.Optimizer, loop: "hvd.elastic.Loop"
) -> Iterator[None]:
    for step in loop:
        with step:
            loss_of(model, step.inputs).backward()
            optimizer.step()
        yield


TRAININGS = {
    "elastic": train_elastic,
    "anew": train_anew,
    "ddp": train_ddp,
    "torchft": train_torchft,
}


def main() -> None:
    """Train as the command line has it, until this process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=(*TRAININGS, "cost"))
    parser.add_argument("--state", type=int, choices=WIDTHS, default=2)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--builds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    notes = Notes()
    if options.how == "cost":
        measure_cost(notes, options.builds, options.rounds)
    else:
        with suppress(BrokenPipeError):
            TRAININGS[options.how](notes, options.state, options.size)


if __name__ == "__main__":
    main()
