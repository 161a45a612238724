"""The parts of a training step, and what one block of steps took."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """A part of a step, in the order in which they follow each other."""

    INPUT = "input"
    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Variant(StrEnum):
    """Who steps, and whether gradients are reduced."""

    ONE_RANK = "one_rank"
    ALL_RANKS = "all_ranks"
    NO_COMMUNICATION = "no_communication"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step took, the mean over a block of steps.

    Attributes:
        step_s: Of the slowest rank, undisturbed.
        phases_s: Of the rank whose phases add up to most. On an accelerator they come
            from steps of their own, with a synchronisation after each phase, and add
            up to more than ``step_s``.
    """

    step_s: float
    phases_s: Mapping[Phase, float]


Round = Mapping[Variant, StepTimes]
"""One block of steps of every variant, measured one after the other."""
