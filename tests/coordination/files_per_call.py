"""Count the files of ronde that a call enters: what a reader must open to follow it.

    ronde run -n 2 python tests/coordination/files_per_call.py

``named_allreduce``: ``hvd.allreduce(x, name=...)``, from call to result. ``gradient``:
one of a ``hvd.DistributedOptimizer``, from its hook in backward to its sum. Both when
warm, in all threads of rank 0. Left out is what only waits: see ``_WAITING``.
"""

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

import ronde
import ronde.torch as hvd

_ROOT = Path(ronde.__file__).parent
_WAITING = {"sleep_while", "num_polls", "spin", "_num_runnable"}
"""Functions of loops that spin, yield and sleep: many calls that lead nowhere."""
_NUM_WARM = 20
_NUM_COUNTED = 101


class _Files:
    """Takes down the files of all functions that are called while it is on."""

    def __init__(self) -> None:
        self._entered = set[str]()
        self._is_on = False
        # The session's threads begin later, and take this over.
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def of(self, calls: Iterator[Callable[[], object]]) -> list[str]:
        """Return the files that a call enters, relative to the package.

        Of many calls the median one: where a rank is late, more code sees to it.
        """
        for call in islice(calls, _NUM_WARM):
            call()
        found: list[list[str]] = []
        for call in islice(calls, _NUM_COUNTED):
            self._entered = set()
            self._is_on = True
            call()
            self._is_on = False
            paths = [Path(name) for name in self._entered]
            inner = [path.relative_to(_ROOT) for path in paths if _ROOT in path.parents]
            found.append(sorted(map(str, inner)))
        return sorted(found, key=len)[_NUM_COUNTED // 2]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            code = frame.f_code
            if code.co_name not in _WAITING:
                self._entered.add(code.co_filename)


def named_allreduce() -> Iterator[Callable[[], object]]:
    """Yield named all-reduces of a few bytes."""
    tensor = torch.ones(1)
    while True:
        yield lambda: hvd.allreduce(tensor, name="x")


def gradient() -> Iterator[Callable[[], object]]:
    """Yield backward passes that reduce one gradient; each step begins outside."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
    )
    while True:
        loss = model(torch.ones(2, 4)).sum()
        yield loss.backward
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Print the number of files of both calls, and the files if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files")
    asked = parser.parse_args()
    import torch._dynamo  # noqa: F401  by the first optimizer, long where all is noted

    files = _Files()
    hvd.init()
    if hvd.size() < 2:
        parser.error("size must be at least 2, got 1. Type: ronde run -n 2 ...")
    for make in (named_allreduce, gradient):
        entered = files.of(make())
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"{make.__name__} {len(entered)}")
            if asked.list:
                print("".join(f"    {name}\n" for name in entered), end="")
    hvd.shutdown()


if __name__ == "__main__":
    main()
