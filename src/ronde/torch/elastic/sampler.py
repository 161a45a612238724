"""A sampler for jobs that may gain or lose ranks in the middle of an epoch."""

import math
import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from ronde.session.session import rank, size


class ElasticSampler(Sampler[int]):
    """Divides the remaining samples of an epoch among the ranks.

    Make it part of a ``TorchState``; call ``record_batch`` after each batch and
    ``set_epoch`` at the *end* of each epoch. Arguments must be equal on all ranks, and
    the length of ``dataset`` must not change.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which no sample is processed yet."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count ``batch_size`` samples of each rank as processed."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return ``epoch`` and ``processed_num``."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved sampler stopped, with the current ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.divide(size(), rank())

    def divide(self, num_replicas: int, rank: int) -> None:
        """Divide the remaining samples among ``num_replicas`` ranks."""
        self.num_replicas = num_replicas
        self.rank = rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311  no secret
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # A sample may repeat several times, as when 1 is left for 3 ranks.
        filled = islice(cycle(self.remaining_indices), self.total_size)
        return islice(filled, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
