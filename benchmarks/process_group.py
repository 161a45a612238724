"""``backend="ronde"`` against Gloo, call by call and step by step, in one run.

Both have a group over the same ranks, and are measured by turns: the median over rounds
of the time of a call on rank 0, and the ratio of Gloo's to ronde's. All but messages
go through a group that sends nothing, too (torch's "fake"): ``limit`` is Gloo's ratio
to that, and so what no engine can pass.
``--busy N`` has N other programs want the cores meanwhile.

    ronde run -n 2 python benchmarks/process_group.py
    ronde run -n 2 python benchmarks/process_group.py --busy 2 --only calls
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers "fake"

Call = Callable[[], object]
Make = Callable[[dist.ProcessGroup], Call]
BACKENDS = ("gloo", "ronde", "fake")
_SPIN = "import os\nos.setsid()\nwhile True: pass"


def all_reduce(numel: int) -> Make:
    def make(group: dist.ProcessGroup) -> Call:
        tensor = torch.ones(numel)
        return lambda: dist.all_reduce(tensor, group=group)

    return make


def all_gather(group: dist.ProcessGroup) -> Call:
    own = torch.ones(1 << 16)
    whole = torch.empty(dist.get_world_size() << 16)
    return lambda: dist.all_gather_into_tensor(whole, own, group=group)


def messages(group: dist.ProcessGroup) -> Call:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, got = torch.ones(1 << 16), torch.empty(1 << 16)

    def exchange() -> None:
        right, left = (rank + 1) % size, (rank - 1) % size
        operations = [
            dist.P2POp(dist.isend, sent, right, group),
            dist.P2POp(dist.irecv, got, left, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange


def objects(group: dist.ProcessGroup) -> Call:
    found: list[object] = [None] * dist.get_world_size()
    return lambda: dist.all_gather_object(found, {"step": 1}, group=group)


def barrier(group: dist.ProcessGroup) -> Call:
    return lambda: dist.barrier(group=group)


def new_group(group: dist.ProcessGroup) -> Call:
    backend, made = dist.get_backend(group), list[dist.ProcessGroup]()

    def make_and_end() -> None:
        made.append(dist.new_group(backend=backend))
        if len(made) > 1:  # all have connected in the one before: Gloo does not wait
            dist.destroy_process_group(made.pop(0))

    return make_and_end


def mlp() -> nn.Sequential:
    """Return 15.8 million parameters."""
    torch.manual_seed(0)
    sizes = [(784, 4096), (4096, 3072), (3072, 10)]
    layers = [each for size in sizes for each in (nn.Linear(*size), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def training(model: nn.Module) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = torch.randn(32, 784), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def ddp(group: dist.ProcessGroup) -> Call:
    model = DistributedDataParallel(mlp(), process_group=group)
    if dist.get_backend(group) == "fake":  # DDP asks its works for results
        model.register_comm_hook(None, leave)
    return training(model)


def leave(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp(*, in_group_memory: bool) -> Make:
    def make(group: dist.ProcessGroup) -> Call:
        model, mesh = mlp(), DeviceMesh.from_group(group, "cpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if in_group_memory and dist.get_backend(group) == "ronde":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_allocate_memory_from_process_group_for_comm(True)
        return training(model)

    return make


CALLS = {
    "all_reduce 4 B": (all_reduce(1), 200),
    "all_reduce 64 KiB": (all_reduce(1 << 14), 100),
    "all_reduce 4 MiB": (all_reduce(1 << 20), 10),
    "all_gather 256 KiB": (all_gather, 40),
    "exchange 256 KiB": (messages, 40),
    "all_gather_object": (objects, 20),
    "barrier": (barrier, 100),
    "new_group": (new_group, 5),
}
STEPS = {
    "DDP step": (ddp, 4),
    "FSDP2 step": (fsdp(in_group_memory=False), 4),
    "FSDP2 step, group memory": (fsdp(in_group_memory=True), 4),
}


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Have programs of other sessions want the cores."""
    command = [sys.executable, "-c", _SPIN]
    others = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def measure(
    make: Make, groups: list[dist.ProcessGroup], count: int, rounds: int
) -> list[float]:
    """Return each group's median time of a call, in seconds."""
    calls = [make(group) for group in groups]
    times: list[list[float]] = [[] for _ in groups]
    for number in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            if number:  # the first warms up
                own.append((time.perf_counter() - start) / count)
    return [statistics.median(own) for own in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--only", choices=["calls", "steps"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    gloo, ronde, fake = (dist.new_group(backend=name) for name in BACKENDS)
    cases = {
        **(CALLS if options.only != "steps" else {}),
        **(STEPS if options.only != "calls" else {}),
    }
    if is_first:
        load = os.getloadavg()[0]
        print(f"{dist.get_world_size()} ranks, load {load:.1f}, busy {options.busy}")
        head = f"{'Gloo ms':>9} {'ronde ms':>9} {'ratio':>6} {'limit':>6}"
        print(f"{'':26} {head}", flush=True)
    with busy(options.busy if is_first else 0):
        for name, (make, count) in cases.items():
            groups = [gloo, ronde] if make is messages else [gloo, ronde, fake]
            theirs, ours, *none = measure(make, groups, count, options.rounds)
            if is_first:
                columns = f"{1e3 * theirs:9.3f} {1e3 * ours:9.3f} {theirs / ours:6.2f}"
                limit = "".join(f"{theirs / seconds:7.2f}" for seconds in none)
                print(f"{name:26} {columns}{limit}", flush=True)
    dist.barrier()  # or one ends what another still connects
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
