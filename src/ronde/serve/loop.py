"""The loop of all ranks: one leader sends frames, and every rank takes each step alike.

A frame has the digest of all steps before. A rank with another digest ends the loop, so
ranks that are out of step make at most one step more.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import torch

from ronde import progress
from ronde.collectives.objects import TensorGroup, broadcast_json
from ronde.errors import CollectiveError
from ronde.plain_values import from_plain, to_plain
from ronde.serve.engine import InferenceEngine
from ronde.serve.requests import InferenceRequest, Token
from ronde.status.reporter import Part, add_source
from ronde.status.values import PendingCollective

LEADER = 0


class Commands(NamedTuple):
    """The leader's decisions before a step."""

    add: tuple[InferenceRequest, ...] = ()
    cancel: tuple[int, ...] = ()  # ids of requests of earlier frames
    is_last: bool = False  # no step follows


class StepFrame(NamedTuple):
    """The commands as all ranks get them, and the leader's state."""

    step: int
    digest: int
    commands: Commands


class StepResult(NamedTuple):
    """The tokens of a step, and its times on the leader."""

    tokens: Sequence[Token]
    step_s: float  # in the engine
    frame_s: float  # in the broadcast of the frame


class Leader(Protocol):
    """The side of the loop that only the leader has."""

    def commands(self, *, is_idle: bool) -> Commands:
        """Return the next commands; may wait for a second if all ranks are idle."""
        ...

    def on_step(self, result: StepResult) -> None:
        """Take the tokens of a step."""


class OutOfStepError(CollectiveError):
    """This rank has made other tokens than the leader."""


def run_loop(group: TensorGroup, engine: InferenceEngine, leader: Leader | None) -> int:
    """Take steps until the leader ends the loop; return their number. Collective.

    Args:
        group: All ranks.
        leader: Given on rank 0 alone.

    Raises:
        OutOfStepError: This rank differs from the leader.
        CollectiveError: Another rank has ended.
    """
    step = digest = 0
    frames = _Frames(group, leader, engine)
    while True:
        frame = frames.exchange(step, digest)
        if (frame.step, frame.digest) != (step, digest):
            raise OutOfStepError(
                f"ranks must make the same tokens, but rank {group.rank} has digest "
                f"{digest:08x} before step {step}, and rank {LEADER} has "
                f"{frame.digest:08x} before step {frame.step}. The model or the engine "
                "is not deterministic on one of them."
            )
        for request_id in frame.commands.cancel:
            engine.cancel(request_id)
        for request in frame.commands.add:
            engine.add(request)
        if frame.commands.is_last:
            return step
        if not engine.has_work:  # else the model's own collectives show who is lost
            group.all_gather(torch.zeros(1)).wait()
        begun_s, tokens = time.monotonic(), engine.step() if engine.has_work else []
        step_s = time.monotonic() - begun_s
        if leader is not None:
            leader.on_step(StepResult(tokens, step_s, frames.duration_s))
        if tokens:
            progress(step=step, tokens=len(tokens))
        words = [[token.id, token.token, token.finish] for token in tokens]
        digest = crc32(repr((words, engine.has_work)).encode(), digest)
        step += 1


class _Frames:
    """The broadcasts of frames, which ``ronde why`` sees as collectives."""

    def __init__(
        self, group: TensorGroup, leader: Leader | None, engine: InferenceEngine
    ) -> None:
        self._group, self._leader, self._engine = group, leader, engine
        self._step, self.duration_s = 0, 0.0
        self._begun_s: float | None = None
        add_source(self.report)

    def report(self) -> Part:
        begun_s = self._begun_s
        if begun_s is None:
            return Part()
        age_s = time.monotonic() - begun_s
        frame = PendingCollective("frame", "serve", "broadcast", self._step, 0, age_s)
        return Part(collectives=(frame,))

    def exchange(self, step: int, digest: int) -> StepFrame:
        """Return the leader's frame."""
        self._step = step
        self._begun_s = begun_s = time.monotonic()
        plain = broadcast_json(self._group, lambda: self._make(step, digest), LEADER)
        self.duration_s = time.monotonic() - (self._begun_s or begun_s)
        self._begun_s = None
        return from_plain(StepFrame, plain)

    def _make(self, step: int, digest: int) -> object:
        is_idle = not self._engine.has_work
        self._begun_s = None  # the leader does not wait for other ranks yet
        leader = self._leader
        commands = Commands() if leader is None else leader.commands(is_idle=is_idle)
        self._begun_s = time.monotonic()
        return to_plain(StepFrame(step, digest, commands))
