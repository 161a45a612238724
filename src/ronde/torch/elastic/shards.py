"""Elastic data from iterables that have a state, such as ``StatefulDataLoader``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ronde.errors import UsageError
from ronde.session.session import rank, size
from ronde.torch.elastic.data import Share
from ronde.torch.elastic.position import Position, StepShard, derive_seed
from ronde.torch.mpi_ops import Sum, allreduce


@runtime_checkable
class Stateful(Protocol):
    """An iterable of batches with a state; each epoch begins with ``iter()``."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Any:
        """Return the state after the batch that was yielded last."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Make the next iterator continue from a state."""
        ...


class ShardState(NamedTuple):
    """A shard's state, saved before batch ``number`` of ``epoch``."""

    epoch: int
    number: int
    state: Any


def sum_over_ranks(value: int) -> int:
    """Return the sum of ``value`` over all ranks; collective."""
    total = allreduce(torch.tensor([value]), op=Sum, name="elastic.samples")
    return int(total)


def first_length(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        batch = list(cast("Mapping[Any, Any]", batch).values())
    if issubclass(type(batch), (list, tuple)) and batch:
        return first_length(batch[0])
    raise UsageError(
        "a batch must begin with a tensor, whose length is the number of samples, got "
        f"{type(batch).__name__}. Pass num_samples to ElasticShards."
    )


class ElasticShards:
    """Data of an elastic job in shards, each read by a single rank.

    A step takes one batch from every shard that is not at its end. Each rank gets the
    batches of its own shards as micro-batches, possibly none. So the total batch
    does not depend on the number of ranks. ``next()`` is collective, as it sums the
    numbers of samples over ranks.

    Here ``position.samples`` counts steps, not samples. A lost rank's shards continue
    from the newest state that another rank got through ``load_state_dict`` or
    ``merge_states``; later batches are read again and dropped.

    Raises:
        UsageError: A shard has no state, or there are more ranks than shards.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        *,
        seed: int = 0,
        epochs: int | None = None,
        num_samples: Callable[[Any], int] = first_length,
        add_up: Callable[[int], int] = sum_over_ranks,
    ) -> None:
        for index, shard in enumerate(shards):
            if not isinstance(shard, Stateful):
                raise UsageError(
                    f"shard {index} must have state_dict() and load_state_dict(), got "
                    f"{type(shard).__name__}. Another rank needs them to continue "
                    "after a rank is lost."
                )
        self.epochs = epochs
        self.position = Position()
        self._shards = [_Shard(shard) for shard in shards]
        self._seed = seed
        self._num_samples = num_samples
        self._add_up = add_up
        self._rank_and_size: tuple[int, int] | None = None

    def seek(self, position: Position, rank: int, size: int) -> None:
        """Continue at ``position``, and release the shards of other ranks."""
        if size > len(self._shards):
            raise UsageError(
                f"size must be at most the number of shards, {len(self._shards)}, got "
                f"{size}. Lower --max-ranks or make more shards."
            )
        self.position, self._rank_and_size = Position(*position), (rank, size)
        for index, shard in enumerate(self._shards):
            if index % size != rank:
                shard.save(self.position)
                shard.release()

    def __iter__(self) -> Iterator[Share]:
        return self

    def __next__(self) -> Share:
        """Return this rank's batches of the next step; collective."""
        own_rank, own_size = self._rank_and_size or (rank(), size())
        if self._rank_and_size is None:
            self.seek(self.position, own_rank, own_size)
        for start in (self.position, Position(self.position.epoch + 1)):
            if self.epochs is not None and start.epoch >= self.epochs:
                raise StopIteration
            own = self._shards[own_rank::own_size]
            batches = [batch for shard in own for batch in shard.draw(*start)]
            counts = [self._num_samples(batch) for batch in batches]
            total = self._add_up(sum(counts))
            if total:
                self.position = Position(start.epoch, start.samples + 1)
                weights = tuple(count * own_size / total for count in counts)
                shard = StepShard(start, self.position, total, (), (), weights)
                seed = derive_seed(self._seed, *start, own_rank)
                return Share(shard, seed, iter(batches))
        raise UsageError("the shards had no batch in a whole epoch.")

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the shard states known to this rank.

        Call ``seek`` first if a step was undone.
        """
        for shard in self._shards:
            shard.save(self.position)
        states = {i: s.saved for i, s in enumerate(self._shards) if s.saved}
        return {"position": tuple(self.position), "shards": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = Position(*state_dict["position"])
        for index, state in state_dict["shards"].items():
            self._shards[index].load(ShardState(*state))

    def merge_states(self, state_dict: dict[str, Any]) -> None:
        """Store another rank's newer states of shards that this rank does not read.

        Exchange states from time to time, with ``allgather_object``, so that few
        batches are read again when a rank is lost.
        """
        for index, state in state_dict["shards"].items():
            self._shards[index].keep(ShardState(*state))

    def close(self) -> None:
        """Release all iterators."""
        for shard in self._shards:
            shard.release()


class _Shard:
    """A shard, with the position of its iterator."""

    def __init__(self, source: Stateful) -> None:
        self._source = source
        self.saved: ShardState | None = None
        self._is_held = False  # True if this rank reads it
        self._batches: Iterator[Any] | None = None
        self._next = (0, 0)  # epoch and number of the next batch
        self._last: tuple[tuple[int, int], Any] | None = None
        self._end = (-1, 0)  # the last finished epoch, and its number of batches

    def draw(self, epoch: int, number: int) -> list[Any]:
        """Return a list with batch ``number`` of ``epoch``, or [] past the end."""
        wanted = (epoch, number)
        is_drawn = self._last is not None and self._last[0] == wanted
        is_known = is_drawn or self._is_past_end(wanted)
        if not self._is_held or (self._next > wanted and not is_known):
            self._rewind(wanted)
        while self._next <= wanted and not self._is_past_end(wanted):
            self._advance()
        # If its step was undone, the last batch is returned again.
        return [batch for at, batch in [self._last or ((), ())] if at == wanted]

    def save(self, position: Position) -> None:
        """Save the state, unless an undone step has read past ``position``."""
        if self._is_held and self._next <= position:
            self.saved = ShardState(*self._next, self._source.state_dict())

    def load(self, state: ShardState) -> None:
        self.release()
        self.saved = state

    def keep(self, state: ShardState) -> None:
        if not self._is_held and (not self.saved or state[:2] > self.saved[:2]):
            self.saved = state

    def release(self) -> None:
        self._is_held = False
        self._batches = self._last = None

    def _is_past_end(self, wanted: tuple[int, int]) -> bool:
        return wanted[0] == self._end[0] and wanted >= self._end

    def _rewind(self, wanted: tuple[int, int]) -> None:
        """Restart from the saved state."""
        self.release()
        if self.saved is None:
            self.saved = ShardState(0, 0, self._source.state_dict())
        if self.saved[:2] > wanted:
            raise UsageError(
                f"a shard cannot go back to (epoch, batch) {wanted}: its state was "
                f"saved at {self.saved[:2]}. Load the state of that position."
            )
        self._source.load_state_dict(self.saved.state)
        self._next, self._end = self.saved[:2], (-1, 0)
        self._is_held = True

    def _advance(self) -> None:
        if self._batches is None:
            self._batches = iter(self._source)
        epoch, number = self._next
        try:
            self._last = self._next, next(self._batches)
            self._next = epoch, number + 1
        except StopIteration:
            self._end, self._next = self._next, (epoch + 1, 0)
            self._batches = None
