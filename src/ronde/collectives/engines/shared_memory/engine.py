"""Collectives of the ranks of one machine, through memory that all of them map."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import Store

from ronde.collectives.engine import (
    AllocateExchange,
    AllocateRows,
    Engine,
    ErrorContext,
    ReduceOp,
    Reduction,
    Work,
)
from ronde.collectives.engines.shared_memory import phases
from ronde.collectives.engines.shared_memory.point_to_point import (
    CHANNEL_BYTES,
    ChannelMemory,
    PointToPoint,
)
from ronde.collectives.engines.shared_memory.progress import FIRST_NAP_S, ProgressEngine
from ronde.collectives.engines.shared_memory.shared_state import (
    ControlBlock,
    ExchangeBytes,
    SharedState,
    StagingSlots,
    segment_files,
    share_segments,
    slot_bytes,
    through_store,
)
from ronde.collectives.engines.shared_memory.waiting import Peers
from ronde.collectives.shapes import CallLayout
from ronde.collectives.store import scope_of

_PAGE_BYTES = 4096


class SharedMemoryEngine(Engine):
    """Moves CPU tensors between ranks that run on one machine."""

    name = "shared_memory"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        first_nap_s: float = FIRST_NAP_S,
    ) -> None:
        """Connect to all other ranks; collective.

        ``first_nap_s`` is the first polling interval of a sleeping wait.

        Raises:
            NoSharedMemoryError: The ranks are on several machines, or memory is short.
            CollectiveError: Not all ranks connected in time.
        """
        self._scope = scope_of(store)
        with ErrorContext("connecting", rank, size, timeout_s, self._scope):
            exchange = through_store(store, rank, size, timeout_s)
            self._connect(exchange, rank, size, timeout_s)
        self._progress.first_nap_s = first_nap_s

    def _connect(
        self, exchange: ExchangeBytes, rank: int, size: int, timeout_s: float
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        staging_at = ControlBlock.size_bytes(size)
        with segment_files(exchange, rank) as files:
            peers = Peers([each.process for each in files])
            room = slot_bytes(size, is_crowded=peers.is_crowded)
            channels_at = staging_at + 2 * room
            num_bytes = _in_pages(channels_at + size * CHANNEL_BYTES)
            segments = share_segments(
                exchange, rank, files, num_bytes, is_populated=False
            )
        blocks = [ControlBlock(segment, size) for segment in segments]
        self._progress = ProgressEngine(blocks, rank, peers, timeout_s, self._scope)
        self._state = SharedState(
            rank, blocks, StagingSlots(segments, staging_at, room)
        )
        channels = ChannelMemory(blocks, segments, channels_at)
        self._messages = PointToPoint(self._progress, channels)
        self._reductions = phases.KnownReductions(size)

    def require_open(self) -> None:
        self._progress.require_usable()

    def native(self, call: str, like: Tensor, op: ReduceOp) -> Reduction:
        # torch's kernels reduce every dtype.
        return Reduction(op, scales=True)

    def all_reduce(
        self, source: Tensor, out: Tensor, reduction: Reduction
    ) -> Work[None]:
        known = self._reductions.find("all_reduce", out, reduction)
        steps = known.all_reduce(self._state, source, out, known)
        return self._progress.submit("all_reduce", steps)

    def reduce_scatter(
        self, source: Tensor, out: Tensor, counts: Sequence[int], reduction: Reduction
    ) -> Work[None]:
        known = self._reductions.find("reduce_scatter", source, reduction)
        steps = phases.reduce_scatter(self._state, source, out, counts, known)
        return self._progress.submit("reduce_scatter", steps)

    def all_gather(
        self, own: Tensor, out: Tensor, counts: Sequence[int], call: str = "all_gather"
    ) -> Work[None]:
        layout = CallLayout(call, own.dtype, (own.numel(),))
        return self.gather_rows(layout, own, 1, lambda _: out)

    def refuse(self, layout: CallLayout) -> None:
        self._progress.submit(layout.call, phases.refuse(self._state, layout))

    def gather_rows(
        self, layout: CallLayout, data: Tensor, row_bytes: int, allocate: AllocateRows
    ) -> Work[None]:
        steps = phases.gather_rows(self._state, layout, data, row_bytes, allocate)
        return self._progress.submit(layout.call, steps)

    def exchange_rows(
        self,
        layout: CallLayout,
        data: Tensor,
        splits: Sequence[int],
        row_bytes: int,
        allocate: AllocateExchange,
    ) -> Work[None]:
        steps = phases.exchange_rows(
            self._state, layout, data, splits, row_bytes, allocate
        )
        return self._progress.submit(layout.call, steps)

    def broadcast(self, data: Tensor, root: int) -> Work[None]:
        steps = phases.broadcast(self._state, data, root)
        return self._progress.submit("broadcast", steps)

    def send(self, data: Tensor, to: int, tag: int) -> Work[None]:
        return self._messages.send(data, to, tag)

    def recv(self, data: Tensor, source: int, tag: int) -> Work[None]:
        return self._messages.recv(data, source, tag)

    def find_sender(self, tag: int) -> int | None:
        self._progress.require_usable()
        return self._messages.find_sender(tag)

    def barrier(self) -> Work[None]:
        return self._progress.submit("barrier", phases.barrier(self._state))

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_populated: bool = True,
    ) -> Tensor:
        if device.type != "cpu" or numel == 0:
            return super().allocate(numel, dtype, device)
        num_bytes = _in_pages(numel * dtype.itemsize)
        exchange, rank = self.exchange, self.rank
        room = (self.size, num_bytes) if is_populated else ()
        with segment_files(exchange, rank, *room) as files:
            segments = share_segments(
                exchange, rank, files, num_bytes, is_populated=is_populated
            )
        own = self._state.heap.add(segments, self.rank)
        with torch.inference_mode(mode=False):
            return own[: numel * dtype.itemsize].view(dtype)

    def clone(self) -> "SharedMemoryEngine":
        self._progress.require_usable()
        copy = SharedMemoryEngine.__new__(SharedMemoryEngine)
        copy._scope = self._scope  # noqa: SLF001  same class
        copy._connect(self.exchange, self.rank, self.size, self.timeout_s)  # noqa: SLF001  its own
        return copy

    def close(self) -> None:
        self._progress.close()


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
