"""Programs carried out over an engine's point-to-point calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.collectives.engine import Engine, ReduceOp, Work
from ronde.collectives.engines.scheduled.program import Message
from ronde.collectives.schedule import Action

PIECE_BYTES = 512 * 1024
"""The longest message: long enough that posting it costs little beside sending it."""
_MAX_FREE = 32


class Executor:
    """Carries out one program at a time, over an engine that does nothing else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: list[Tensor] = []

    def run(
        self,
        program: Sequence[Message],
        vector: Tensor,
        op: ReduceOp = ReduceOp.SUM,
    ) -> None:
        """Send, receive and reduce until the program is over.

        Args:
            program: This rank's.
            vector: Contiguous, of one dimension, on the CPU; changed in place.
            op: What a REDUCE does; AVERAGE adds.

        Raises:
            CollectiveError: A message failed; others may still be under way.
        """
        run = _Run(self, program, vector, op)
        for index in range(len(program)):
            run.post(index)
        run.complete_all()

    def post(self, message: Message, tensor: Tensor) -> Work[Any]:
        """Start a message that comes from or goes to ``tensor``."""
        if message.action is Action.SEND:
            return self._engine.send(tensor, message.peer, message.tag)
        return self._engine.recv(tensor, message.peer, message.tag)

    def borrow(self) -> Tensor:
        """Return memory for one message."""
        if self._free:
            return self._free.pop()
        with torch.inference_mode(mode=False):
            return torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")

    def give_back(self, memory: Tensor) -> None:
        """Keep memory for a later message."""
        if len(self._free) < _MAX_FREE:
            self._free.append(memory)


class _Run:
    """One program under way."""

    def __init__(
        self,
        executor: Executor,
        program: Sequence[Message],
        vector: Tensor,
        op: ReduceOp,
    ) -> None:
        self._executor = executor
        self._program = program
        self._vector = vector
        self._op = op
        self._works: dict[int, Work[Any]] = {}
        self._arrivals: dict[int, Tensor] = {}

    def post(self, index: int) -> None:
        """Start a message once all that it needs is complete."""
        message = self._program[index]
        for need in message.needs:
            self.complete(need)
        tensor = self._vector[message.start : message.stop]
        if message.action is Action.REDUCE:
            memory = self._arrivals[index] = self._executor.borrow()
            tensor = memory.view(tensor.dtype)[: tensor.numel()]
        self._works[index] = self._executor.post(message, tensor)

    def complete(self, index: int) -> None:
        """Wait for a message and add what it brought, unless that was done."""
        work = self._works.pop(index, None)
        if work is None:
            return
        work.wait()
        memory = self._arrivals.pop(index, None)
        if memory is not None:
            message = self._program[index]
            own = self._vector[message.start : message.stop]
            combine_(own, memory.view(own.dtype)[: own.numel()], self._op)
            self._executor.give_back(memory)

    def complete_all(self) -> None:
        """Wait for all messages that nothing needed."""
        for index in sorted(self._works):
            self.complete(index)


def combine_(own: Tensor, arrived: Tensor, op: ReduceOp) -> None:
    """Reduce two ranks' elements into ``own``; AVERAGE adds."""
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        own.add_(arrived)
    elif op is ReduceOp.PRODUCT:
        own.mul_(arrived)
    else:
        extreme = torch.minimum if op is ReduceOp.MIN else torch.maximum
        extreme(own, arrived, out=own)
