"""Policies of admission: pure functions of requests and of an engine's capacity.

The three are those of TensorRT-LLM's batch manager (docs/source/batch_manager.md).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Capacity(NamedTuple):
    """The requests that an engine can hold at once; equal on all ranks."""

    num_blocks: int  # of the KV cache
    block_tokens: int
    max_requests: int
    max_len: int  # tokens of a prompt and its answer
    vocabulary: int  # token ids are below it
    evicts: bool = False  # it pauses requests when blocks run out, and resumes them


class TokenCounts(NamedTuple):
    """The tokens of a request."""

    num_prompt: int
    max_tokens: int
    num_made: int = 0

    def most_blocks(self, capacity: Capacity) -> int:
        """Return the blocks that it takes with all its tokens."""
        return -(-(self.num_prompt + self.max_tokens) // capacity.block_tokens)

    def next_blocks(self, capacity: Capacity) -> int:
        """Return the blocks that it takes after one token more."""
        return -(-(self.num_prompt + self.num_made + 1) // capacity.block_tokens)


_Counts = Sequence[TokenCounts]


def guaranteed_no_evict(running: _Counts, waiting: _Counts, capacity: Capacity) -> int:
    """Return the number that may start, in order, so that all surely finish."""
    return _admit(running, waiting, capacity, TokenCounts.most_blocks)


def max_utilization(running: _Counts, waiting: _Counts, capacity: Capacity) -> int:
    """Return the number that may start so that the next step has enough blocks."""
    return _admit(running, waiting, capacity, TokenCounts.next_blocks)


def static_batch(running: _Counts, waiting: _Counts, capacity: Capacity) -> int:
    """Return the number that may start once nothing runs, and 0 before."""
    return 0 if running else guaranteed_no_evict(running, waiting, capacity)


Policy = Callable[[_Counts, _Counts, Capacity], int]
POLICIES: Mapping[str, Policy] = {
    each.__name__: each for each in (guaranteed_no_evict, max_utilization, static_batch)
}


def _admit(
    running: _Counts,
    waiting: _Counts,
    capacity: Capacity,
    blocks_of: Callable[[TokenCounts, Capacity], int],
) -> int:
    num_free = capacity.num_blocks - sum(blocks_of(each, capacity) for each in running)
    most = max(0, capacity.max_requests - len(running))
    for number, each in enumerate(waiting[:most]):
        num_free -= blocks_of(each, capacity)
        if num_free < 0:
            return number
    return min(most, len(waiting))
