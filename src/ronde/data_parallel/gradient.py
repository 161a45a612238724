"""One parameter's gradient between two optimizer steps, and the factors of its sum."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors that turn a sum over ranks into what the caller asked for.

    result = after * sum over ranks of (before * gradient).

    Attributes:
        before: Factor of what goes in.
        after: Factor of what comes out.
        size: Number of ranks that add something.
    """

    before: float
    after: float
    size: int

    @classmethod
    def of(
        cls, size: int, *, is_average: bool, predivide: float = 1.0, passes: int = 1
    ) -> "Scaling":
        """Derive the factors.

        Args:
            size: Number of ranks.
            is_average: Divide by ``size``; before the sum, unless ``predivide`` says
                how much of it comes before.
            predivide: Horovod's ``gradient_predivide_factor``.
            passes: Divide by this many backward passes as well.
        """
        if not is_average:
            return cls(1.0 / passes, 1.0, size)
        if predivide == 1.0:
            return cls(1.0 / (size * passes), 1.0, size)
        return cls(1.0 / (predivide * passes), predivide / size, size)

    def without(self, num_joined: int) -> "Scaling":
        """Return the same factors where some ranks do not add anything any more."""
        return replace(self, size=self.size - num_joined) if num_joined else self

    @property
    def keep(self) -> float:
        """The factor for a result to enter a further round and come out unchanged."""
        return 1.0 / (self.size * self.before * self.after)


@dataclass(slots=True)
class Gradient:
    """A parameter and the state of its gradient between two optimizer steps.

    Attributes:
        name: How messages call it.
        parameter: The leaf whose ``.grad`` this is.
        view: Its place in its bucket, strided like the parameter; None where it has
            none.
        result: What the last round made ``parameter.grad``; None before the first.
        sparse_dims: Where it travels sparse, the number of its sparse dimensions.
        num_passes: Backward passes since the last reduction.
        is_reduced: Whether ``result`` is still that: nothing was added to it. Kept only
            where ``Scaling.keep`` is not 1.
        was_used: Whether this rank contributed something in the round under way.
        was_sparse: Whether what it contributed was sparse.
        is_fusible: Whether backward may write it to ``view``, in some passes: see
            ``fusion``. Equal on all ranks.
        is_scaled_in_sum: Whether the factor before the sum is the bucket's to apply.
        is_open: Whether a round is under way that waits for its value.
        is_written: Whether backward has written its value to ``view`` and is about to
            hand it over.
        num_hooks: Hooks of ours on the parameter.
        num_fused: Values that backward wrote to ``view`` until now.
    """

    name: str
    parameter: Tensor
    view: Tensor | None = None
    result: Tensor | None = None
    sparse_dims: int = 0
    num_passes: int = 0
    is_reduced: bool = False
    was_used: bool = False
    was_sparse: bool = False
    is_fusible: bool = False
    is_scaled_in_sum: bool = False
    is_open: bool = False
    is_written: bool = False
    num_hooks: int = 0
    num_fused: int = 0

    @property
    def is_planned(self) -> bool:
        """Whether the ranks have agreed on how it travels."""
        return self.view is not None or self.sparse_dims > 0

    def factor(self, scaling: Scaling) -> float:
        """Return what ``parameter.grad`` is to be multiplied by where it is moved."""
        before = 1.0 if self.is_scaled_in_sum else scaling.before
        if self.is_reduced and self.parameter.grad is self.result:
            return before * scaling.keep
        return before

    def move(self, scaling: Scaling) -> None:
        """Move ``parameter.grad`` into the bucket, scaled for the sum, and detach it.

        From here to the end of the round ``parameter.grad`` is None: whatever backward
        adds meanwhile goes to a tensor of its own and is not lost. What backward wrote
        into the bucket itself stays where it is.
        """
        grad, view = self.parameter.grad, self.view
        if grad is None or view is None:
            return
        factor = self.factor(scaling)
        if self.was_used:
            view.add_(dense(grad), alpha=factor)
        elif grad.is_sparse or grad.data_ptr() != view.data_ptr():
            torch.mul(dense(grad), factor, out=view)
        else:
            self.num_fused += self.is_written
            if factor != 1.0:
                view.mul_(factor)
        self.was_used = True
        self.is_written = False
        self.was_sparse |= grad.is_sparse
        self.parameter.grad = None

    def give(self, result: Tensor) -> None:
        """Hand a result to the parameter."""
        self.parameter.grad = self.result = result

    def forget(self) -> None:
        """Go back to before the first round; ``parameter.grad`` stays."""
        self.view = self.result = None
        self.sparse_dims = self.num_passes = 0
        self.is_reduced = self.is_scaled_in_sum = self.is_open = False


def dense(grad: Tensor) -> Tensor:
    """Return ``grad``, detached, with every element in its place."""
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad
