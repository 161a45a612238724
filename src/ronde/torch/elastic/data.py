"""Data loading for elastic jobs: each sample once per epoch, even if ranks change.

Note [The loader after a change of ranks]
    The workers of the ``DataLoader`` keep running, as their requests contain sample ids
    and no ranks. Batches that they prefetched for the old ranks are dropped. Requests
    are numbered, and the loader returns only the batch with the expected number, so no
    batch is lost or repeated. Workers do not load samples of outdated requests.
"""

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import RawValue
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from ronde.errors import UsageError
from ronde.session.session import rank, size
from ronde.torch.elastic.position import Position, StepSampler, StepShard, derive_seed


class Share:
    """One rank's samples of one step.

    ``batch_size`` counts the samples of all ranks; ``ids`` are this rank's samples.
    ``seed`` depends only on the step and the rank. A program that seeds torch with it
    repeats a step with the same dropout.
    """

    def __init__(
        self, shard: StepShard, seed: int, micro_batches: Iterator[Any]
    ) -> None:
        self.start, self.position, self.batch_size, self.ids, _, self.weights = shard
        self.seed = seed
        self.micro_batches = micro_batches
        if len(self.weights) == 1:
            self._inputs = next(micro_batches)
            self.micro_batches = iter([self._inputs])

    @property
    def inputs(self) -> Any:
        """The collated samples of a share with a single micro-batch."""
        if len(self.weights) != 1:
            raise UsageError(
                f"inputs must be a single micro-batch, got {len(self.weights)}. "
                "Iterate over step.micro_batches."
            )
        return self._inputs


@runtime_checkable
class DataSource(Protocol):
    """Protocol for data that any rank can continue to read from a saved position."""

    epochs: int | None  # None: endless
    position: Position  # after the share that was returned last

    def seek(self, position: Position, rank: int, size: int) -> None:
        """Continue at ``position`` as rank ``rank`` of ``size``."""
        ...

    def __next__(self) -> Share: ...

    def state_dict(self) -> dict[str, Any]:
        """Return a state from which any rank can continue at ``position``."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another source; ``seek`` is called afterwards."""
        ...

    def close(self) -> None:
        """Stop all workers."""
        ...


class ElasticLoader:
    """Loads each rank's share of every step from a map-style data set.

    Arguments must be equal on all ranks. With the policy "global", ``batch_size`` is
    the number of samples summed over all ranks, which stays the same when ranks change;
    with "per-rank" it is the number per rank. The last batch of an epoch may be
    short; ``drop_last`` skips it. ``micro_batch`` is the number of samples of a
    micro-batch; by default a share is one micro-batch. If shares or micro-batches
    differ in size, gradients need ``GradientWeights``. Batch norm computes its
    statistics per micro-batch.

    With ``seed_samples`` the generators of Python, NumPy and torch are seeded from
    (seed, epoch, id) before each sample is loaded, so that its augmentation is the same
    on any rank. Without workers, this also reseeds the generators that the training
    uses. Other keywords are passed to ``DataLoader``.

    Raises:
        UsageError: The data set is not map-style, or a value is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        micro_batch: int | None = None,
        policy: str = "global",
        epochs: int | None = None,
        seed_samples: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        require_position(dataset)
        foreign = {"sampler", "batch_sampler", "in_order"} & set(options)
        if foreign:
            raise UsageError(
                f"ElasticLoader does not accept {', '.join(sorted(foreign))}, as it "
                "chooses the samples and their order itself."
            )
        self.dataset = dataset
        self.epochs = epochs
        self.position = Position()
        self._seed = seed
        self._sampler = StepSampler(
            len(dataset), batch_size, shuffle, seed, drop_last, micro_batch, policy
        )
        self._rank_and_size: tuple[int, int] | None = None
        self._ahead = Position()  # of the next step to request
        self._unsent: deque[_Request] = deque()  # the rest of a step
        self._num_sent = 0
        self._num_arrived = 0  # dropped ones included
        self._expected = 0  # number of the next request to return
        self._oldest = 0  # the first number since the last seek
        self._turn = RawValue(ctypes.c_long, 0)  # shared with workers: counts seeks
        seed_of_samples = seed if seed_samples else None
        collate = collate_fn or cast("Any", torch_data).default_collate
        # Its own generator, from which DataLoader draws the seed of its workers.
        options.setdefault("generator", torch.Generator().manual_seed(seed))
        self._loader = DataLoader[Any](
            _Loading(dataset, collate, self._turn, seed_of_samples),  # pyright: ignore[reportArgumentType]
            batch_sampler=_Requests(self._next_request),  # pyright: ignore[reportArgumentType]
            collate_fn=_unchanged,
            **options,
        )
        self._batches: Iterator[Any] | None = None

    def seek(self, position: Position, rank: int, size: int) -> None:
        """Continue at ``position`` as rank ``rank`` of ``size``.

        Prefetched batches are dropped; workers keep running.
        """
        self._sampler.full_batch(size)
        self._rank_and_size = rank, size
        self.position = self._ahead = Position(*position)
        self._unsent.clear()
        self._turn.value += 1
        self._expected = self._oldest = self._num_sent

    def __iter__(self) -> Iterator[Share]:
        return self

    def __next__(self) -> Share:
        """Return this rank's share of the next step."""
        own_rank, own_size = self._ranks()
        shard = self._sampler.shard(self.position, own_rank, own_size)
        if self._is_over(shard):
            raise StopIteration
        numbers = range(self._expected, self._expected + len(shard.weights))
        self._expected = numbers.stop
        seed = derive_seed(self._seed, *shard.start, own_rank)
        share = Share(shard, seed, map(self._fetch, numbers))
        self.position = shard.position
        return share

    def state_dict(self) -> dict[str, Any]:
        return self.position._asdict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = Position(**state_dict)
        if self._rank_and_size is not None:
            self.seek(self.position, *self._rank_and_size)

    def close(self) -> None:
        """Stop the workers; the next use starts new ones."""
        # A traceback may refer to the iterator, which would keep workers alive.
        getattr(self._batches, "_shutdown_workers", lambda: None)()
        self._batches = None
        if self._rank_and_size is not None:
            self.seek(self.position, *self._rank_and_size)

    def _ranks(self) -> tuple[int, int]:
        own = self._rank_and_size or (rank(), size())
        if self._rank_and_size is None:
            self.seek(self.position, *own)
        return own

    def _is_over(self, shard: StepShard) -> bool:
        return self.epochs is not None and shard.start.epoch >= self.epochs

    def _next_request(self) -> "_Request":
        """Return the next request, or an empty one after the last epoch.

        The requests never end, because ``seek`` may go back.
        """
        if not self._unsent:
            shard = self._sampler.shard(self._ahead, *self._ranks())
            parts = shard.micro_batches
            if self._is_over(shard):
                parts = ((),)
            else:
                self._ahead = shard.position
            turn, epoch = self._turn.value, shard.start.epoch
            self._unsent += (_Request(0, turn, epoch, ids) for ids in parts)
        request = self._unsent.popleft()._replace(number=self._num_sent)
        self._num_sent += 1
        return request

    def _fetch(self, expected: int) -> Any:
        if expected < max(self._num_arrived, self._oldest):
            raise UsageError(
                "a micro-batch was requested after its step had ended. Use all "
                "micro_batches of a step inside the step."
            )
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            while True:
                number, batch = next(self._batches)
                self._num_arrived = number + 1
                if number == expected:
                    return batch
        except BaseException:
            self.seek(self.position, *self._ranks())  # a retry starts over
            raise


class _Request(NamedTuple):
    """A request to a worker for one micro-batch."""

    number: int
    turn: int  # of ``ElasticLoader.seek``
    epoch: int
    ids: tuple[int, ...]


class _Requests:
    """Endless batch sampler that calls ``draw`` for each batch."""

    def __init__(self, draw: Callable[[], _Request]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[_Request]:
        while True:
            yield self._draw()


class _Loading:
    """Data set of the workers; skips requests made before the last ``seek``."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        turn: Any,
        seed: int | None,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._turn = turn
        self._seed = seed

    def __getitems__(self, request: _Request) -> tuple[int, Any]:
        if not request.ids or request.turn != self._turn.value:
            return request.number, None
        if self._seed is None and hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(list(request.ids))
            return request.number, self._collate(samples)
        samples: list[Any] = []
        for sample_id in request.ids:
            if request.turn != self._turn.value:
                return request.number, None
            if self._seed is not None:
                _seed_all(derive_seed(self._seed, request.epoch, sample_id))
            samples.append(self.dataset[sample_id])
        return request.number, self._collate(samples)


def _unchanged(batch: Any) -> Any:
    return batch


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)


def require_position(data: object) -> None:
    """Raise ``UsageError`` for data without sample ids from 0 to ``len() - 1``."""
    kind = type(data)
    if issubclass(kind, DataLoader):
        cure = "Pass the DataLoader's data set to ElasticLoader."
    elif issubclass(kind, IterableDataset) or not (
        hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):
        cure = (
            "Or pass to ElasticShards at least --max-ranks iterables, each with "
            "state_dict() and load_state_dict()."
        )
    else:
        return
    raise UsageError(
        "data of an elastic job must be a map-style data set, with ids from 0 to "
        f"len() - 1, got {kind.__name__}. Other ranks could not continue where a lost "
        f"rank stopped. {cure}"
    )
