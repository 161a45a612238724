"""The process group, which implements torch's calls with a communicator."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from ronde.collectives import ReduceOp
from ronde.collectives.store import clone_of
from ronde.errors import CollectiveError
from ronde.memory import available_memory
from ronde.process_group.arena import Arena
from ronde.process_group.base import Options, Works
from ronde.process_group.data_movement import DataMovement
from ronde.process_group.monitored_barrier import monitored_barrier
from ronde.process_group.reductions import Reductions
from ronde.process_group.tensor_lists import only
from ronde.process_group.works import GroupWork, Late

_PROBE_EVERY_S = 0.0005
_ARENA_PART = 4  # of the available memory
_ARENA_BITS = 20  # whole MiB


class RondeProcessGroup(Reductions, DataMovement):
    """The process group of backend "ronde"; torch's C++ and Python call it."""

    # Memory

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and self._communicator.has_shared_memory

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a vector in shared memory; collective the first time.

        If shared memory is full, the vector is in private memory.
        """
        if self._arena is None:
            own = available_memory().num_bytes // (_ARENA_PART * self._size)
            least = torch.tensor([own >> _ARENA_BITS << _ARENA_BITS], device="cpu")
            num_bytes = int(self._communicator.all_reduce(least, ReduceOp.MIN).wait())
            whole = self._communicator.allocate(
                num_bytes, torch.uint8, is_populated=False
            )
            self._arena = Arena(whole)
        found = self._arena.allocate(numel, dtype)
        if found is None:
            found = torch.empty(numel, dtype=dtype, device=device)
        return found

    # Messages

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> GroupWork:
        tensor = only(tensors, "tensors").data
        return self._start(
            "send",
            lambda: [self._communicator.send(tensor, to, tag)],
            lambda _: list(tensors),
        )

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> GroupWork:
        tensor = only(tensors, "tensors").data
        work = self._start(
            "recv",
            lambda: [self._communicator.recv(tensor, source, tag)],
            lambda _: list(tensors),
        )
        work.source = source
        return work

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        """Receive from any rank; receiving starts only in ``wait()``."""
        self._require_own_process()
        tensor = only(tensors, "tensors").data

        def finish(_: list[Any]) -> list[Tensor]:
            until_s = time.monotonic() + self._timeout_s
            while (source := self._communicator.find_sender(tensor, tag)) is None:
                if time.monotonic() > until_s:
                    raise CollectiveError(
                        f"recv timed out after {self._timeout_s:g} s: no rank has "
                        "sent a message."
                    )
                time.sleep(_PROBE_EVERY_S)
            self._communicator.recv(tensor, source, tag).wait()
            work.source = source
            return list(tensors)

        late = Late(self._attendance, self.abort, "recv")
        work = GroupWork(self._futures, None, finish, self._timeout_s, late)
        return work

    # All together

    def barrier(self, opts: Options = None) -> GroupWork:
        def start() -> Works:
            return [self._communicator.barrier()]

        return self._start("barrier", start, lambda _: [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002  torch's
    ) -> None:
        """Wait for all ranks; rank 0's error names the first absent rank.

        With ``wait_all_ranks`` it names all absent ranks. Error messages are like
        Gloo's. The group stays usable after an error.
        """
        self._num_monitored += 1
        limit = timedelta(seconds=self._timeout_s) if timeout is None else timeout
        store = PrefixStore(f"monitored{self._num_monitored}", clone_of(self._store))
        monitored_barrier(
            store, self._rank, self._size, limit, is_complete=wait_all_ranks
        )

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None

        def finish(_: list[Any]) -> list[Tensor]:
            return [tensor for work in works for tensor in work.result()]

        own = [each for work in works for each in work.works or ()]
        late = Late(self._attendance, self.abort, "coalesced")
        return GroupWork(self._futures, own, finish, self._timeout_s, late)
