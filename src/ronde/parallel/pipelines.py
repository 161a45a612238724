"""Pipeline schedules: idle time and microbatches held, in theory and simulated.

A forward takes 1, a backward 2: the gradients of inputs and of weights take 1 each.
Stage s of p ranks is on rank s mod p. Messages take no time.

Source: GPipe, Huang et al. 2019 (arXiv:1811.06965); 1F1B and its interleaved form,
Narayanan et al. 2021 (arXiv:2104.04473).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from ronde.errors import UsageError

_BACKWARD_COST = 2


class ScheduleName(StrEnum):
    """Torch's names."""

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"


class PipelineAction(NamedTuple):
    """A pass of one microbatch through one stage."""

    is_forward: bool
    stage: int
    microbatch: int


class PipelineRun(NamedTuple):
    """What a schedule costs."""

    idle_share: float  # Of the time of all ranks.
    num_held: float  # Most microbatches that a rank keeps, each through all its stages.


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule and its sizes.

    Raises:
        UsageError: The schedule cannot have these sizes.
    """

    schedule: ScheduleName
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1  # Stages of each rank.

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                got = getattr(self, name)
                raise UsageError(f"{name} must be at least 1, got {got}.")
        if self.schedule is not ScheduleName.INTERLEAVED:
            if self.num_chunks > 1:
                raise UsageError(
                    f"num_chunks must be 1 with {self.schedule}, got {self.num_chunks}."
                    f" Take {ScheduleName.INTERLEAVED}."
                )
        elif self.num_microbatches % self.num_ranks:
            raise UsageError(
                f"num_microbatches must be a multiple of num_ranks, {self.num_ranks}, "
                f"with {self.schedule}, got {self.num_microbatches}."
            )

    def predict(self) -> PipelineRun:
        """Return the theory's figures."""
        p, m, v = self.num_ranks, self.num_microbatches, self.num_chunks
        held = m if self.schedule is ScheduleName.GPIPE else self._num_first(0) + 1
        return PipelineRun((p - 1) / (v * m + p - 1), min(held, v * m) / v)

    def actions(self) -> tuple[tuple[PipelineAction, ...], ...]:
        """Return what each rank does, in order."""
        return tuple(self._actions_of(rank) for rank in range(self.num_ranks))

    def _num_first(self, rank: int) -> int:
        """Return how many forwards a rank does before those paired with a backward."""
        p, v = self.num_ranks, self.num_chunks
        if self.schedule is ScheduleName.INTERLEAVED:
            return 2 * (p - 1 - rank) + (v - 1) * p
        return p - 1 - rank

    def _actions_of(self, rank: int) -> tuple[PipelineAction, ...]:
        p, v = self.num_ranks, self.num_chunks
        total = v * self.num_microbatches
        forwards: list[PipelineAction] = []
        backwards: list[PipelineAction] = []
        for place in range(total):
            # p microbatches go through a chunk, then the same ones through the next.
            turn, within = divmod(place, p * v)
            chunk, microbatch = within // p, turn * p + within % p
            first = PipelineAction(True, chunk * p + rank, microbatch)  # noqa: FBT003
            forwards.append(first)
            stage = (v - 1 - chunk) * p + rank
            backwards.append(first._replace(is_forward=False, stage=stage))
        if self.schedule is ScheduleName.GPIPE:
            return (*forwards, *backwards)
        num_first = min(self._num_first(rank), total)
        pairs = zip(forwards[num_first:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        return (*forwards[:num_first], *steady, *backwards[total - num_first :])


def cut_evenly(costs: Sequence[float], num_stages: int) -> tuple[range, ...]:
    """Cut layers into consecutive stages, so that the dearest one is cheapest.

    Every stage has a layer at least.

    Raises:
        UsageError: There are fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise UsageError(
            f"layers must be at least as many as stages: {num_stages}, got "
            f"{len(costs)}. Cut the model into more layers, or take fewer stages."
        )
    sums = [0.0, *accumulate(costs)]
    # Where the last stage begins, by how many layers are in the stages, stage by stage.
    dearest = [sums]
    starts: list[list[int]] = []
    for stage in range(1, num_stages):
        found = [
            min(
                (max(dearest[-1][start], sums[stop] - sums[start]), start)
                for start in range(stage, stop)
            )
            if stop > stage
            else (math.inf, 0)
            for stop in range(len(sums))
        ]
        dearest.append([cost for cost, _ in found])
        starts.append([start for _, start in found])
    stages, stop = list[range](), len(costs)
    for begins in reversed(starts):
        stages.append(range(begins[stop], stop))
        stop = begins[stop]
    return (range(stop), *reversed(stages))


def simulate(actions: Sequence[Sequence[PipelineAction]]) -> PipelineRun:
    """Run each rank's actions in order, each as soon as what it needs is done.

    Raises:
        UsageError: Ranks wait for each other, or for an action that nobody has.
    """
    last = max(action.stage for own in actions for action in own)
    ends: dict[PipelineAction, int] = {}
    times, places = [0] * len(actions), [0] * len(actions)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, own in enumerate(actions):
            while places[rank] < len(own):
                action = own[places[rank]]
                needed = _needs(action, last)
                if not all(each in ends for each in needed):
                    break
                start = max([times[rank], *(ends[each] for each in needed)])
                times[rank] = start + (1 if action.is_forward else _BACKWARD_COST)
                ends[action] = times[rank]
                places[rank] += 1
                is_moving = True
    for rank, own in enumerate(actions):
        if places[rank] < len(own):
            raise UsageError(
                "actions must be in an order that can be, got one where rank "
                f"{rank} waits forever to do {own[places[rank]]}."
            )
    busy = sum(1 if each.is_forward else _BACKWARD_COST for each in ends)
    idle_share = 1 - busy / (len(actions) * max(times))
    num_chunks = (last + 1) / len(actions)
    return PipelineRun(idle_share, max(map(_most_held, actions)) / num_chunks)


def _needs(action: PipelineAction, last: int) -> list[PipelineAction]:
    if action.is_forward:
        return [action._replace(stage=action.stage - 1)] if action.stage else []
    needed = [action._replace(is_forward=True)]
    if action.stage < last:
        needed.append(action._replace(stage=action.stage + 1))
    return needed


def _most_held(actions: Sequence[PipelineAction]) -> int:
    held = most = 0
    for action in actions:
        held += 1 if action.is_forward else -1
        most = max(most, held)
    return most
