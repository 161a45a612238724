"""One rank of one peer of ``collectives.py``: waits for orders and obeys them.

It runs in the peer's own Python, which may have neither torch nor ronde: imports are
where they are needed.
"""

import gc
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import numpy as np

WAIT_S = 120.0


class Peer:
    """An all-reduce of one library: the first elements of a buffer, in place."""

    def __init__(self, name: str, max_numel: int) -> None:
        self.name = name
        make = {"torch_gloo": _torch_gloo, "openmpi": _mpi, "mpich": _mpi}
        make_peer = make.get(name, _ronde)
        self.rank, self.size, self.values, self.reducing = make_peer(name, max_numel)

    def check(self, numel: int) -> bool:
        """Return True if a reduction is right, and leave zeros behind."""
        ramp = np.arange(numel, dtype=np.float32) % 251
        own = self.values[:numel]
        own[:] = ramp * (self.rank + 1)
        self.reducing(numel)()
        expected = ramp * (self.size * (self.size + 1) // 2)
        is_right = bool((own == expected).all())
        # Sums of zeros are zeros, however often: no overflow slows the timing down.
        own[:] = 0.0
        return is_right

    def time(self, numel: int, num_iterations: int) -> float:
        """Return the seconds of one reduction, as this rank sees it."""
        reduce = self.reducing(numel)
        meet = self.reducing(1)
        meet()
        meet()
        start = time.perf_counter()
        for _ in range(num_iterations):
            reduce()
        return (time.perf_counter() - start) / num_iterations

    def copy(self, num_bytes: int, num_iterations: int) -> float:
        """Return bytes read and written a second by a copy."""
        source = np.ones(num_bytes // 4, np.float32)
        target = np.zeros_like(source)
        self.reducing(1)()
        start = time.perf_counter()
        for _ in range(num_iterations):
            target[:] = source
        return 2 * num_bytes * num_iterations / (time.perf_counter() - start)


Made = tuple[int, int, Any, Callable[[int], Callable[[], object]]]


def _ronde(name: str, max_numel: int) -> Made:
    import torch

    from ronde.collectives import connect
    from ronde.world import read_rank_info

    engine, _, is_foreign = name.partition("-")
    communicator = connect(read_rank_info(), engine=engine, timeout_s=WAIT_S)
    if is_foreign:
        tensor = torch.zeros(max_numel)
    else:
        tensor = communicator.allocate(max_numel, torch.float32)

    def reducing(numel: int) -> Callable[[], object]:
        part = tensor[:numel]
        return lambda: communicator.all_reduce(part).wait()

    return communicator.rank, communicator.size, tensor.numpy(), reducing


def _torch_gloo(_name: str, max_numel: int) -> Made:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.zeros(max_numel)

    def reducing(numel: int) -> Callable[[], object]:
        part = tensor[:numel]
        return lambda: dist.all_reduce(part)

    return dist.get_rank(), dist.get_world_size(), tensor.numpy(), reducing


def _mpi(_name: str, max_numel: int) -> Made:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    space = np.zeros(max_numel + 16, np.float32)
    first = -space.ctypes.data % 64 // 4
    values = space[first : first + max_numel]

    def reducing(numel: int) -> Callable[[], object]:
        part = [values[:numel], MPI.FLOAT]
        return lambda: world.Allreduce(MPI.IN_PLACE, part)

    return world.rank, world.size, values, reducing


def main() -> None:
    """Obey the orders that come over a socket until it closes."""
    name, address, max_numel = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with Client(address, "AF_UNIX") as orders:
        peer = Peer(name, max_numel)
        gc.disable()
        library = ""
        if name in ("openmpi", "mpich"):
            from mpi4py import MPI

            library = MPI.Get_library_version().partition("\n")[0][:40]
        orders.send((name, peer.rank, library))
        while True:
            try:
                order, *arguments = orders.recv()
            except EOFError:
                return
            orders.send(getattr(peer, order)(*arguments))


if __name__ == "__main__":
    main()
