"""The collectives as values, with their gradients.

Each is a function of tensors: ``start`` it, or ``carry_out`` it under autograd. The
gradient of one is made of others, so that gradients of gradients are there as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ronde.collectives import ReduceOp, Work
from ronde.collectives.torch_modes import new_like, outside_compiler
from ronde.coordination.coordinator import Coordinator
from ronde.coordination.requests import NamedOperation, OpKind
from ronde.errors import CollectiveError, UsageError
from ronde.torch.operators import REDUCE_OPS, REDUCIBLE, Adasum, Average, Sum
from ronde.torch.process_sets import ProcessSet
from ronde.torch.submission import detached, member_of, require_dtypes
from ronde.torch.works import Given

Tensors = Sequence[Tensor]
Submission = tuple[Coordinator, NamedOperation]
"""Who is to be asked for what."""


class CollectiveFunction(Protocol):
    """One or several tensors in, as many out."""

    def prepare(self, tensors: Tensors) -> Submission:
        """Check it and say what is to be submitted; the result is outside autograd.

        Raises:
            UsageError: A dtype is not supported, or the set does not fit.
            CollectiveError: There is no session.
        """
        ...

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Turn gradients of its results into those of its inputs; collective.

        Args:
            gradients: One for each result.
            num_rows: The inputs' sizes in dimension 0.
        """
        ...


def start(collective: CollectiveFunction, tensors: Tensors) -> Work[tuple[Tensor, ...]]:
    """Submit a collective and return at once.

    Raises:
        UsageError: It cannot be, or its name is under way.
        CollectiveError: There is no session, or the job is shut down.
    """
    coordinator, operation = collective.prepare(tensors)
    return coordinator.submit(operation)


def start_in_place(
    collective: "AllreduceFunction | BroadcastFunction", tensors: tuple[Tensor, ...]
) -> Work[tuple[Tensor, ...]]:
    """Start a collective whose results are the very tensors it is given."""
    own = detached(tensors)
    coordinator, operation = collective.prepare_into(own, own)
    return Given(coordinator.submit(operation), tensors)


def carry_out_in_place(
    collective: "AllreduceFunction | BroadcastFunction", tensors: tuple[Tensor, ...]
) -> None:
    """Carry out a collective whose results go where its inputs are."""
    own = detached(tensors)
    coordinator, operation = collective.prepare_into(own, own)
    coordinator.run(operation)


def carry_out(collective: CollectiveFunction, tensors: Tensors) -> tuple[Tensor, ...]:
    """Run a collective, under autograd where a tensor needs that."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return cast(
                    "tuple[Tensor, ...]", _Differentiable.apply(collective, *tensors)
                )
    coordinator, operation = collective.prepare(tensors)
    return coordinator.run(operation)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collective: CollectiveFunction, *tensors: Tensor) -> Any:  # noqa: ANN401  autograd's
        ctx.collective = collective
        ctx.num_rows = [t.shape[0] if t.dim() else 1 for t in tensors]
        coordinator, operation = collective.prepare(tensors)
        return coordinator.run(operation)

    @staticmethod
    @outside_compiler
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ANN401  autograd's
        return None, *ctx.collective.gradients(gradients, ctx.num_rows)


@dataclass(frozen=True, slots=True)
class AllreduceFunction:
    """All-reduce; its gradient is the same reduction of gradients.

    Attributes:
        op: Horovod's number.
        name: On the wire; empty for none.
        process_set: Whose ranks.
        prescale: Multiplies the inputs.
        postscale: Multiplies the results.
        is_group: Whether the tensors are one group.
    """

    op: int
    name: str
    process_set: ProcessSet
    prescale: float = 1.0
    postscale: float = 1.0
    is_group: bool = False

    def prepare(self, tensors: Tensors) -> Submission:
        """Have the results in new tensors of the inputs' layouts."""
        return self.prepare_into(detached(tensors), None)

    def prepare_into(
        self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...] | None
    ) -> Submission:
        """Have the results in ``outputs``.

        Args:
            tensors: Outside autograd.
            outputs: Where the results go; ``tensors`` itself to work in place, None for
                new tensors.

        Raises:
            UsageError: A dtype has no such reduction, or the set does not fit.
            NotImplementedError: Adasum on this set, or over so many ranks.
            CollectiveError: There is no session.
        """
        require_dtypes(tensors, REDUCIBLE[self.op])
        member = member_of(self.process_set, "Allreduce")
        if self.op == Adasum:
            require_adasum(self.process_set, len(member.ranks))
        return member.coordinator, NamedOperation(
            OpKind.ADASUM if self.op == Adasum else OpKind.ALLREDUCE,
            tensors,
            self.name,
            outputs or _new(tensors),
            self.is_group,
            REDUCE_OPS.get(self.op, ReduceOp.SUM),
            self.prescale,
            self.postscale,
        )

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Reduce the gradients alike."""
        del num_rows
        name = _name_of_gradients(self.name)
        alike = AllreduceFunction(
            self.op,
            name,
            self.process_set,
            self.prescale,
            self.postscale,
            self.is_group,
        )
        return carry_out(alike, gradients)


@dataclass(frozen=True, slots=True)
class AllgatherFunction:
    """All-gather; its gradient is this rank's rows of the averaged gradients.

    Attributes: as of ``AllreduceFunction``.
    """

    name: str
    process_set: ProcessSet
    is_group: bool = False

    def prepare(self, tensors: Tensors) -> Submission:
        """Check it: see ``CollectiveFunction``."""
        require_dtypes(tensors)
        member = member_of(self.process_set, "Allgather")
        return member.coordinator, NamedOperation(
            OpKind.ALLGATHER, detached(tensors), self.name, (), self.is_group
        )

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Average the gradients and take this rank's rows, wherever they lie."""
        name = _name_of_gradients(self.name)
        averaged = carry_out(
            AllreduceFunction(Average, name, self.process_set, is_group=self.is_group),
            gradients,
        )
        (rows,) = carry_out(
            AllgatherFunction(name, self.process_set),
            (torch.tensor([num_rows], device="cpu"),),
        )
        rank = member_of(self.process_set, "Allgather").rank
        starts = cast("list[int]", rows[:rank].sum(0).tolist())
        return [
            gradient.narrow(0, start, length)
            for gradient, start, length in zip(averaged, starts, num_rows, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BroadcastFunction:
    """Copy from one rank; its gradient is the average there and zero elsewhere.

    Attributes:
        root_rank: Among all ranks, also in a process set.
        name: As of ``AllreduceFunction``.
        process_set: As of ``AllreduceFunction``.
    """

    root_rank: int
    name: str
    process_set: ProcessSet

    def prepare(self, tensors: Tensors) -> Submission:
        """Have the results in new tensors of the inputs' layouts."""
        return self.prepare_into(detached(tensors), None)

    def prepare_into(
        self, tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...] | None
    ) -> Submission:
        """Have the results in ``outputs``: see ``AllreduceFunction.prepare_into``."""
        require_dtypes(tensors)
        member = member_of(self.process_set, "Broadcast")
        if self.root_rank not in member.ranks:
            raise UsageError(
                f"broadcast received invalid root rank {self.root_rank} for provided "
                "process set"
            )
        root = member.ranks.index(self.root_rank)
        return member.coordinator, NamedOperation(
            OpKind.BROADCAST, tensors, self.name, outputs or _new(tensors), root=root
        )

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Average the gradients; they are the root's."""
        del num_rows
        name = _name_of_gradients(self.name)
        averaged = carry_out(
            AllreduceFunction(Average, name, self.process_set), gradients
        )
        member = member_of(self.process_set, "Broadcast")
        if member.ranks[member.rank] == self.root_rank:
            return averaged
        return [torch.zeros_like(gradient) for gradient in averaged]


@dataclass(frozen=True, slots=True)
class ReducescatterFunction:
    """Reduce-scatter by sum or average; its gradient is gathered.

    Attributes: as of ``AllreduceFunction``.
    """

    op: int
    name: str
    process_set: ProcessSet
    prescale: float = 1.0
    postscale: float = 1.0
    is_group: bool = False

    def prepare(self, tensors: Tensors) -> Submission:
        """Check it.

        Raises:
            UsageError: A dtype has no such reduction, or the set does not fit.
            CollectiveError: There is no session, or ``op`` is neither Average nor Sum.
        """
        require_dtypes(tensors, REDUCIBLE[Average])
        member = member_of(self.process_set, "Reducescatter")
        if self.op not in (Average, Sum):
            raise CollectiveError(
                "Reducescatter currently only supports AVERAGE and SUM."
            )
        return member.coordinator, NamedOperation(
            OpKind.REDUCESCATTER,
            detached(tensors),
            self.name,
            (),
            self.is_group,
            REDUCE_OPS[self.op],
            self.prescale,
            self.postscale,
        )

    def gradients(self, gradients: Tensors, num_rows: list[int]) -> Tensors:
        """Gather the scaled gradients."""
        del num_rows
        member = member_of(self.process_set, "Reducescatter")
        factor = self.prescale * self.postscale
        factor *= len(member.ranks) if self.op == Sum else 1
        name = _name_of_gradients(self.name)
        gather = AllgatherFunction(name, self.process_set, self.is_group)
        return carry_out(gather, [gradient * factor for gradient in gradients])


def _new(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([new_like(tensor) for tensor in tensors])


def _name_of_gradients(name: str) -> str:
    return name and f"{name}.gradient"


def require_adasum(process_set: ProcessSet, size: int) -> None:
    """Refuse ranks that Adasum cannot combine.

    Raises:
        NotImplementedError: Not all ranks, or their number is no power of two.
    """
    if process_set.process_set_id != 0:
        raise NotImplementedError(
            "Adasum does not support non-global process sets yet."
        )
    if size & (size - 1):
        raise NotImplementedError(
            "Running Adasum with non-power of 2 ranks is not supported yet."
        )
