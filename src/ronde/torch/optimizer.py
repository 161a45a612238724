"""An optimizer whose gradients are reduced over all ranks."""

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, zeros_like
from torch.optim import Optimizer

from ronde.collectives.torch_modes import outside_compiler
from ronde.data_parallel import (
    Compression,
    GradientCompression,
    PowerSGD,
    Reducer,
    ReducerOptions,
)
from ronde.errors import UsageError
from ronde.torch.autograd import require_adasum
from ronde.torch.connecting import Connector
from ronde.torch.delta_step import DeltaStep
from ronde.torch.hooked_optimizer import _DistributedOptimizer  # pyright: ignore[reportPrivateUsage]
from ronde.torch.naming import group_indices, name_of, name_parameters
from ronde.torch.operators import Adasum, Average, Sum
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.reductions import allreduce_async_
from ronde.torch.session import current_session, is_initialized
from ronde.torch.stand_in import OptimizerProxy
from ronde.torch.submission import member_of
from ronde.torch.wrappers import refuse_averaged, refuse_sharded

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]

_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to "
    "consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class DistributedOptimizer(OptimizerProxy):
    """Stand in for an optimizer, and reduce its gradients over all ranks.

    Gradients are reduced while ``backward()`` runs and are complete when it returns,
    so whatever one does with gradients in one process, clipping, ``GradScaler``,
    inspecting, several passes before a step, works here unchanged.

    Everything but the members below is the wrapped optimizer's own: ``param_groups``,
    ``state``, ``state_dict()``, ``zero_grad()``, hooks, and ``isinstance``. Learning
    rate schedulers and ``GradScaler`` may be given either of the two.

    With ``op=Adasum`` gradients stay each rank's own: each steps alone, and the ways
    that they went are combined.

    Not collective to create: ranks connect at the first use. Every rank of the process
    set has an optimizer over parameters of equal names and shapes in equal order; of
    several that are alike, those meet that each rank made first. On other ranks it is
    the plain optimizer.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``; gives messages their names.
        compression: What travels: ``Compression.none``, ``fp16``, ``bf16``,
            ``powersgd(rank)``, or any class with ``compress`` and ``decompress``.
        backward_passes_per_step: Passes to accumulate before a reduction.
        op: ``Average``, ``Sum`` or ``Adasum`` over ranks.
        gradient_predivide_factor: With ``Average``, the part of the divisor that is
            applied before the sum; the rest is applied after it.
        num_groups: Deprecated form of ``groups`` as a number.
        groups: Gradients that are reduced together: a number of groups, or lists of
            parameters.
        sparse_as_dense: Reduce sparse gradients as dense ones; the results are sparse.
        process_set: The ranks.
        average_aggregated_gradients: Divide by ``backward_passes_per_step`` as well.
        gradient_accumulation_fusion: Where nobody can see a difference, have backward
            write a large weight's gradient where it is reduced; not a copy of it. For
            CPU tensors.

    Raises:
        UsageError: A value is out of range, or names and parameters do not fit.
        NotImplementedError: Adasum on some of the ranks, or not on 2, 4, 8 ... ranks.
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
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        average_aggregated_gradients: bool = False,
        gradient_accumulation_fusion: bool = True,
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
            is_fusing=gradient_accumulation_fusion,
            tuning=current_session().tuning,
        )
        self.wrapped = optimizer
        # What a copy is made with, besides names and groups.
        self._settings = {
            "compression": compression,
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
            "process_set": None if process_set is global_process_set else process_set,
            "average_aggregated_gradients": average_aggregated_gradients,
        }
        self._groups = options.groups
        self._parameter_names = {parameter: name for name, parameter in named}
        self._is_synchronizing = True
        self._is_synchronized = False
        self._reducer = self._delta = None
        self._is_checked = False
        if not process_set.included():
            return
        if member_of(process_set, "Allreduce").communicator.size > 1:
            refuse_sharded(named)
            refuse_averaged(self._parameter_names)
        if op == Adasum and current_session().world.size > 1:
            self._delta = _make_delta_step(named, compression, process_set)
        else:
            self._reducer = _make_reducer(named, options, process_set)

    _settings: dict[str, Any]
    _groups: tuple[tuple[int, ...], ...]
    _parameter_names: dict[Tensor, str]
    _is_synchronizing: bool
    _is_synchronized: bool
    _is_checked: bool
    _reducer: Reducer | None
    _delta: DeltaStep | None

    @outside_compiler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the wrapped one's
        """Step on gradients that are reduced over all ranks.

        Args:
            closure: Computes the loss and its gradients; they are reduced each time it
                is called. The loss it returns stays this rank's own.
        """
        if not self._is_checked:
            if (self._reducer or self._delta) is not None:
                refuse_averaged(self._parameter_names)  # it may be wrapped since
            self._is_checked = True
        if self._delta is not None:
            return self._delta.step(self.wrapped, closure)
        if self._is_synchronizing and self._is_synchronized:
            warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
        self._is_synchronized = False
        if closure is None:
            self._reduce()
            result = self.wrapped.step()
        else:
            result = self.wrapped.step(self._reduced(closure))
        if self._reducer is not None:
            self._reducer.step_done()
        return result

    @outside_compiler
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients: a method of this class, or compilers do not find it."""
        if self._reducer is not None:
            self._reducer.refuse_put_off()
            if self._is_synchronized:  # and yet not stepped: GradScaler met an inf
                self._reducer.forget()
                self._is_synchronized = False
        self.wrapped.zero_grad(set_to_none=set_to_none)

    @outside_compiler
    def synchronize(self) -> None:
        """Make sure that all gradients are reduced; collective.

        Needed only where no ``backward()`` ran on this rank but one did on others;
        harmless elsewhere, and Horovod's scripts call it before they clip. Does nothing
        with Adasum.
        """
        if self._reducer is not None:
            self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Let ``step()`` take the gradients as they are, after ``synchronize()``."""
        if self._delta is not None:
            raise AssertionError(
                "Skipping synchronization is not supported when using Adasum optimizer."
            )
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = True

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are accumulated before a reduction."""
        return cast("int", self._settings["backward_passes_per_step"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate ``passes`` backward passes before a reduction from now on."""
        _check_passes(passes)
        self._settings["backward_passes_per_step"] = passes
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
        if self._delta is not None:
            self._delta.add(added)

    def __copy__(self) -> "DistributedOptimizer":
        """Return one that shares parameters, state and reductions with this."""
        own = object.__new__(DistributedOptimizer)
        own.__dict__.update(self.__dict__)
        own.wrapped = copy.copy(self.wrapped)
        return own

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401  object's
        """Pickle, and copy deeply, the wrapped optimizer and the settings.

        Where there is no session, as in a program that evaluates a checkpoint, the
        wrapped optimizer comes back.
        """
        names = list(self._parameter_names.values())
        return _restore, (self.wrapped, names, self._groups, self._settings)

    @property
    def _handles(self) -> dict[Tensor, Any]:
        """Horovod's table of reductions under way: none is after ``backward()``."""
        return {}

    def _allreduce_grad_async(self, p: Tensor) -> tuple[int, None]:
        """Start to reduce one gradient by its name; return its handle and context.

        Horovod's hook does it so, and programs look for the method to know that the
        optimizer is distributed. Nothing here calls it.
        """
        if p.grad is None:
            p.grad = zeros_like(p)
        name = self._parameter_names[p]
        return allreduce_async_(p.grad, name=name, op=self._settings["op"]), None

    def _reduce(self) -> None:
        if self._is_synchronizing and self._reducer is not None:
            self._reducer.synchronize()

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:  # noqa: ANN401 - the closure's own
            loss = closure()
            self._reduce()
            return loss

        return call


def _restore(
    wrapped: Optimizer,
    names: list[str],
    groups: tuple[tuple[int, ...], ...],
    settings: dict[str, Any],
) -> Optimizer | DistributedOptimizer:
    if not is_initialized():
        return wrapped
    parameters = [p for group in wrapped.param_groups for p in group["params"]]
    settings["process_set"] = settings["process_set"] or global_process_set
    return DistributedOptimizer(
        wrapped,
        list(zip(names, parameters, strict=True)),
        groups=[[parameters[index] for index in group] for group in groups] or None,
        **settings,
    )


def _make_reducer(
    named: list[tuple[str, Tensor]], options: ReducerOptions, process_set: ProcessSet
) -> Reducer | None:
    session = current_session()
    size = member_of(process_set, "Allreduce").communicator.size
    # One rank has nothing to reduce; only an average over passes is left to be done.
    # But it may become one of several.
    if size == 1 and not (options.is_passes_average or session.knobs.is_elastic):
        return None
    connector = Connector(process_set, named)
    reducer = Reducer(named, connector, options)
    connector.tie(reducer)
    return reducer


def _make_delta_step(
    named: list[tuple[str, Tensor]],
    compression: GradientCompression,
    process_set: ProcessSet,
) -> DeltaStep:
    require_adasum(process_set, current_session().world.size)
    if isinstance(compression, PowerSGD):
        raise UsageError(
            "compression must be none, fp16 or bf16 with op=Adasum, got "
            f"{compression}: Adasum is not linear."
        )
    connector = Connector(process_set, named, ", by Adasum")
    parameters = [parameter for _, parameter in named]
    delta = DeltaStep(parameters, compression, connector)
    connector.tie(delta)
    return delta


def _check(op: int, passes: int, predivide: float) -> None:
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op must be Average, Sum or Adasum, got {op}.")
    if predivide != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor not supported with op != Average")
    if predivide <= 0.0:
        raise UsageError(f"gradient_predivide_factor must be > 0, got {predivide}.")
    _check_passes(passes)


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError("backward_passes_per_step must be > 0")
