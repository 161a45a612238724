"""An optimizer whose gradients are reduced over all ranks."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ronde.data_parallel import (
    Compression,
    GradientCompression,
    Reducer,
    ReducerOptions,
)
from ronde.errors import UsageError
from ronde.torch.naming import group_indices, name_of, name_parameters
from ronde.torch.reductions import Average, Sum
from ronde.torch.session import current_session


class DistributedOptimizer:
    """Stand in for an optimizer, and reduce its gradients over all ranks.

    Gradients are reduced while ``backward()`` runs and are complete when it returns,
    so whatever one does with gradients in one process, clipping, ``GradScaler``,
    inspecting, several passes before a step, works here unchanged.

    Everything but the members below is the wrapped optimizer's own: ``param_groups``,
    ``state``, ``state_dict()``, ``zero_grad()``, hooks, and ``isinstance``. Learning
    rate schedulers and ``GradScaler`` may be given either of the two.

    Collective to create: every rank makes its optimizers in the same order, over
    parameters of equal shapes in equal order.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``; gives messages their names.
        compression: What travels: ``Compression.none``, ``fp16``, ``bf16``,
            ``powersgd(rank)``, or any class with ``compress`` and ``decompress``.
        backward_passes_per_step: Passes to accumulate before a reduction.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: With ``Average``, the part of the divisor that is
            applied before the sum; the rest is applied after it.
        num_groups: Deprecated form of ``groups`` as a number.
        groups: Gradients that are reduced together: a number of groups, or lists of
            parameters.
        sparse_as_dense: Reduce sparse gradients as dense ones; needed for those.
        average_aggregated_gradients: Divide by ``backward_passes_per_step`` as well.

    Raises:
        UsageError: A value is out of range, or names and parameters do not fit.
        CollectiveError: ``init()`` was not called.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: GradientCompression = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        *,
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
    ) -> None:
        _check(op, backward_passes_per_step, gradient_predivide_factor)
        named = name_parameters(optimizer, named_parameters)
        options = ReducerOptions(
            is_average=op == Average,
            predivide=gradient_predivide_factor,
            passes=backward_passes_per_step,
            is_passes_average=average_aggregated_gradients,
            compressor=compression,
            groups=group_indices(named, groups, num_groups),
            is_sparse_densified=sparse_as_dense,
        )
        self.wrapped = optimizer
        self._parameter_names = {parameter: name for name, parameter in named}
        self._is_synchronizing = True
        self._reducer = _make_reducer(named, options)

    wrapped: Optimizer
    _parameter_names: dict[Tensor, str]
    _is_synchronizing: bool
    _reducer: Reducer | None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the wrapped one's
        """Step on gradients that are reduced over all ranks.

        Args:
            closure: Computes the loss and its gradients; they are reduced each time it
                is called. The loss it returns stays this rank's own.
        """
        if closure is None:
            if self._is_synchronizing:
                self.synchronize()
            result = self.wrapped.step()
        else:
            result = self.wrapped.step(self._reduced(closure))
        if self._reducer is not None:
            self._reducer.step_done()
        return result

    def synchronize(self) -> None:
        """Make sure that all gradients are reduced; collective.

        Needed only where no ``backward()`` ran on this rank but one did on others;
        harmless elsewhere, and Horovod's scripts call it before they clip.
        """
        if self._reducer is not None:
            self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Let ``step()`` take the gradients as they are, after ``synchronize()``."""
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate ``passes`` backward passes before a reduction from now on."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; collective, their gradients are reduced as well."""
        self.wrapped.add_param_group(param_group)
        group = len(self.wrapped.param_groups) - 1
        added = self.wrapped.param_groups[group]["params"]
        named = [(name_of(group, index), p) for index, p in enumerate(added)]
        self._parameter_names.update({parameter: name for name, parameter in named})
        if self._reducer is not None:
            self._reducer.add(named)

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:  # noqa: ANN401 - the closure's own
            loss = closure()
            if self._is_synchronizing:
                self.synchronize()
            return loss

        return call

    # A stand-in, not a subclass made at run time: what is not defined above is the
    # wrapped optimizer's, to read, to set (GradScaler sets grad_scale) and to delete.

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The wrapped optimizer's class, so that ``isinstance`` tells the truth."""
        return type(self.wrapped)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the wrapped one's
        if name == "wrapped":  # not there yet: unpickling, a failed __init__
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        is_own = name in DistributedOptimizer.__annotations__
        if is_own or name in DistributedOptimizer.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.wrapped!r})"


def _make_reducer(
    named: list[tuple[str, Tensor]], options: ReducerOptions
) -> Reducer | None:
    session = current_session()
    # One rank has nothing to reduce; only an average over passes is left to be done.
    if session.communicator.size == 1 and not options.is_passes_average:
        return None
    # An order of calls of its own: the hooks of two optimizers may interleave.
    return Reducer(named, session.duplicate(), options)


def _check(op: int, passes: int, predivide: float) -> None:
    if op not in (Average, Sum):
        raise UsageError(f"op must be Average or Sum, got {op}.")
    if predivide != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor not supported with op != Average")
    if predivide <= 0.0:
        raise UsageError(f"gradient_predivide_factor must be > 0, got {predivide}.")
    _check_passes(passes)


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError("backward_passes_per_step must be > 0")
