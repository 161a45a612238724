"""``DistributedOptimizer``, and Horovod's class ``_DistributedOptimizer``."""

import copy
import gc
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, distributed, zeros_like
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ronde.collectives import rows
from ronde.collectives.torch_modes import outside_compiler
from ronde.coordination.requests import OpKind
from ronde.data_parallel import (
    Compression,
    Compressor,
    Reducer,
    ReducerOptions,
)
from ronde.errors import UsageError
from ronde.session.connecting import Connector
from ronde.session.operations import is_sharded, require_adasum
from ronde.session.session import (
    ProcessSet,
    current_session,
    global_process_set,
    is_initialized,
    state_of,
)
from ronde.status.reporter import Part, add_source
from ronde.status.steps import own_meter
from ronde.torch.delta_step import DeltaStep
from ronde.torch.mpi_ops import Adasum, Average, Sum, allreduce_async_, synchronize
from ronde.torch.sharded_step import ShardedStep, require_elementwise
from ronde.world.environment import read_drift

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]

_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to "
    "consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class OptimizerProxy(Optimizer if TYPE_CHECKING else object):
    """Proxy that forwards every attribute that it does not define to an optimizer."""

    wrapped: Optimizer

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The wrapped optimizer's class, so that ``isinstance`` sees it."""
        return type(self.wrapped)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the wrapped one's
        if name == "wrapped":  # not set while unpickling or after a failed __init__
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        own = type(self)
        is_own = name == "wrapped" or name in own.__annotations__
        if is_own or name in own.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class DistributedOptimizer(OptimizerProxy):
    """Optimizer wrapper that reduces gradients over all ranks.

    Gradients are reduced while ``backward()`` runs and are complete when it returns,
    so clipping, ``GradScaler``, gradient accumulation and inspection of gradients work
    unchanged. All other attributes are those of the wrapped optimizer, including hooks,
    and ``isinstance`` sees its class. With ``op=Adasum`` each rank steps with its own
    gradients, and the changes of the parameters are combined.

    Creating one is not collective: ranks connect at the first use. Every rank of the
    process set must make one over parameters with the same names and shapes in the same
    order. Several optimizers over equal parameters are matched by the order of their
    creation. On ranks outside the process set it acts as the plain optimizer.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for names in messages.
        compression: A member of ``Compression``, or any class with ``compress`` and
            ``decompress``.
        backward_passes_per_step: Passes to accumulate before a reduction.
        op: ``Average``, ``Sum`` or ``Adasum`` over ranks.
        gradient_predivide_factor: With ``Average``, the part of the divisor that is
            applied before the sum; the rest is applied after it.
        num_groups: Deprecated form of ``groups`` as a number.
        groups: Gradients that are reduced together: a number of groups, or lists of
            parameters.
        sparse_as_dense: Reduce sparse gradients as dense ones; the results are sparse.
        process_set: The ranks that reduce gradients together.
        average_aggregated_gradients: Divide by ``backward_passes_per_step`` as well.
        gradient_accumulation_fusion: Have backward write the gradients of large linear
            layers straight into the reduction's buffer, if the program cannot see the
            difference. Only for CPU tensors; must be equal on all ranks.
        zero: 1 gives each rank a share of the optimizer's state and step.
        zero_elementwise: Declares, for ``zero=1``, that a custom optimizer updates each
            element from that element's gradient and state alone. LARS and LAMB do not.

    Raises:
        UsageError: A value is out of range, or names and parameters do not fit.
        NotImplementedError: Adasum is used on a process set, or the number of ranks is
            not a power of 2.
        CollectiveError: ``init()`` was not called.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        *,
        average_aggregated_gradients: bool = False,
        gradient_accumulation_fusion: bool = False,
        zero: int = 0,
        zero_elementwise: bool = False,
    ) -> None:
        _check(op, backward_passes_per_step, gradient_predivide_factor, zero)
        if zero:
            require_elementwise(optimizer, is_declared=zero_elementwise)
        named = _name_parameters(optimizer, named_parameters)
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
            can_join=zero == 0,
            drift=read_drift(),
        )
        self.wrapped = optimizer
        # The arguments for a restored copy, besides names and groups.
        self._settings = {
            "compression": compression,
            "backward_passes_per_step": backward_passes_per_step,
            "op": op,
            "gradient_predivide_factor": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
            "process_set": None if process_set is global_process_set else process_set,
            "average_aggregated_gradients": average_aggregated_gradients,
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "zero": zero,
        }
        self._groups = options.groups
        self._parameter_names = {parameter: name for name, parameter in named}
        self._is_synchronizing = True
        self._is_synchronized = False
        self._reducer = self._delta = self._sharded = None
        self._is_checked = False
        self._num_steps = 0
        add_source(self.report)
        if process_set.included():
            self._make_parts(named, options, process_set)

    def _make_parts(
        self,
        named: list[tuple[str, Tensor]],
        options: ReducerOptions,
        process_set: ProcessSet,
    ) -> None:
        ranks = state_of(process_set, OpKind.ALLREDUCE).communicator
        if ranks.size > 1:
            _refuse_sharded(named)
            _refuse_averaged(self._parameter_names)
        if self._settings["zero"] and (ranks.size > 1 or current_session().is_of_views):
            self._sharded = ShardedStep(self.wrapped, ranks.rank, ranks.size)
        if self._settings["op"] == Adasum and current_session().world.size > 1:
            compression = self._settings["compression"]
            self._delta = _make_delta_step(named, compression, process_set)
        else:
            self._reducer = _make_reducer(named, options, process_set)

    _settings: dict[str, Any]
    _groups: tuple[tuple[int, ...], ...]
    _parameter_names: dict[Tensor, str]
    _is_synchronizing: bool
    _is_synchronized: bool
    _is_checked: bool
    _num_steps: int
    _reducer: Reducer | None
    _delta: DeltaStep | None
    _sharded: ShardedStep | None

    @outside_compiler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the wrapped one's
        """Step with gradients that are reduced over all ranks.

        Each call of ``closure`` has its gradients reduced; its loss is not reduced.
        """
        if not self._is_checked:
            if (self._reducer or self._delta) is not None:
                _refuse_averaged(self._parameter_names)  # wrapped since __init__?
            self._is_checked = True
        if self._delta is not None:
            result = self._delta.step(self.wrapped, closure)
            self._num_steps += 1
            return result
        if self._is_synchronizing and self._is_synchronized:
            warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
        self._is_synchronized = False

        def reduced() -> Any:  # noqa: ANN401  the closure's own
            loss = None if closure is None else closure()
            if self._is_synchronizing and self._reducer is not None:
                self._reducer.synchronize()
            return loss

        if self._sharded is not None and self._reducer is not None:
            reducer, is_closure = self._reducer, closure is not None
            result = self._sharded.step(reduced, reducer, is_closure=is_closure)
        elif closure is None:
            reduced()
            result = self.wrapped.step()
        else:
            result = self.wrapped.step(reduced)
        self._num_steps += 1
        own_meter().step_done(self, self._num_steps)
        if self._reducer is not None:
            self._reducer.step_done(self.wrapped)
        return result

    def report(self) -> Part:
        """Return the number of steps, to be shown in this rank's status."""
        return Part(step=self._num_steps)

    @outside_compiler
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; raise ``AssertionError`` if a reduction is postponed."""
        if self._reducer is not None:
            self._reducer.refuse_put_off()
            if self._is_synchronized:  # but not stepped: GradScaler found an inf
                self._reducer.forget()
                self._is_synchronized = False
        self.wrapped.zero_grad(set_to_none=set_to_none)

    @outside_compiler
    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet; collective.

        Needed only if ``backward()`` ran on other ranks but not on this one.
        """
        if self._reducer is not None:
            self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Context in which ``step()`` does not call ``synchronize()``."""
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
    def reducer(self) -> Reducer | None:
        """The gradients' reducer; None with Adasum, one rank, or outside the set."""
        return self._reducer

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that are accumulated before a reduction."""
        return cast("int", self._settings["backward_passes_per_step"])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes to accumulate before a reduction."""
        _check_passes(passes)
        self._settings["backward_passes_per_step"] = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and reduce their gradients as well; collective."""
        self.wrapped.add_param_group(param_group)
        group = len(self.wrapped.param_groups) - 1
        added = self.wrapped.param_groups[group]["params"]
        named = [(_default_name(group, index), p) for index, p in enumerate(added)]
        self._parameter_names.update({parameter: name for name, parameter in named})
        if self._reducer is not None:
            self._reducer.add(named)
        if self._delta is not None:
            self._delta.add(added)
        if self._sharded is not None:
            self._sharded.add_groups()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state.

        With ``zero=1``, first call ``consolidate_state_dict()`` on all ranks; then call
        this only on its ``root``, and before the next step.
        """
        return (self._sharded or self.wrapped).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a plain optimizer's state; with ``zero=1``, only this rank's share."""
        (self._sharded or self.wrapped).load_state_dict(state_dict)

    @staticmethod
    def share_of(optimizer: Optimizer) -> ShardedStep | None:
        """Return the ``ShardedStep`` of an optimizer with ``zero=1``, else None."""
        is_own = isinstance(optimizer, DistributedOptimizer)
        return optimizer._sharded if is_own else None  # noqa: SLF001  its own

    def consolidate_state_dict(self, root: int = 0) -> None:
        """Gather all ranks' state for ``state_dict()`` on ``root``; collective.

        Not needed with ``zero=0``. ``root`` is a rank within the process set.
        """
        if self._sharded is not None and self._reducer is not None:
            self._sharded.consolidate(self._reducer, root)

    def __copy__(self) -> "DistributedOptimizer":
        own = object.__new__(DistributedOptimizer)
        own.__dict__.update(self.__dict__)
        own.wrapped = copy.copy(self.wrapped)
        return own

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:  # noqa: ANN401  object's
        """Pickle or deep-copy the wrapped optimizer and the settings.

        Without a session only the wrapped optimizer is restored.
        """
        if self._sharded is not None:
            raise UsageError(
                "an optimizer with zero=1 cannot be copied or pickled, as it has only "
                "a share of the state. Use its state_dict()."
            )
        names = list(self._parameter_names.values())
        return _restore, (self.wrapped, names, self._groups, self._settings)

    @property
    def _handles(self) -> dict[Tensor, Any]:
        """Horovod's table of reductions in progress; always empty."""
        return {}

    def _allreduce_grad_async(self, p: Tensor) -> tuple[int, None]:
        """Start to reduce one gradient by its name, as Horovod's hook does.

        Programs test for this method to see if an optimizer is distributed.
        """
        if p.grad is None:
            p.grad = zeros_like(p)
        name = self._parameter_names[p]
        return allreduce_async_(p.grad, name=name, op=self._settings["op"]), None


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
    size = state_of(process_set, OpKind.ALLREDUCE).communicator.size
    # A single rank has nothing to reduce, except for an average over passes; but in
    # an elastic job others may join it.
    is_elastic = session.config.is_elastic or session.is_of_views
    if size == 1 and not (options.is_passes_average or is_elastic):
        return None
    connector = Connector(process_set, named)
    reducer = Reducer(named, connector, options)
    connector.register(reducer)
    return reducer


def _make_delta_step(
    named: list[tuple[str, Tensor]],
    compression: type[Compressor],
    process_set: ProcessSet,
) -> DeltaStep:
    require_adasum(process_set, current_session().world.size)
    connector = Connector(process_set, named, ", by Adasum")
    delta = DeltaStep([parameter for _, parameter in named], compression, connector)
    connector.register(delta)
    return delta


def _check(op: int, passes: int, predivide: float, zero: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op must be Average, Sum or Adasum, got {op}.")
    if predivide != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor not supported with op != Average")
    if predivide <= 0.0:
        raise UsageError(f"gradient_predivide_factor must be > 0, got {predivide}.")
    _check_passes(passes)
    if zero not in (0, 1):
        raise UsageError(
            f"zero must be 0 or 1, got {zero}. Use torch's fully_shard for stages 2 "
            "and 3 of ZeRO."
        )
    if zero and op == Adasum:
        raise UsageError(
            "zero=1 and op=Adasum cannot be used together, as with Adasum each rank "
            "takes its own step."
        )


def _check_passes(passes: int) -> None:
    if passes <= 0:
        raise UsageError("backward_passes_per_step must be > 0")


class _DistributedOptimizer(Optimizer):
    """Horovod's optimizer class: hooks start reductions, ``step()`` waits for them.

    For programs that override Horovod's hook, or mix these methods into a class derived
    from the wrapped optimizer's. Gradients are complete after ``synchronize()`` or
    ``step()``, not before::

        cls = type(name, (type(optimizer),), dict(_DistributedOptimizer.__dict__))
        cls(optimizer.param_groups, model.named_parameters())
    """

    def __init__(
        self,
        params: Any,  # noqa: ANN401  the wrapped optimizer's
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: object = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        # The class that uses this mixin sets its own defaults.
        super(self.__class__, self).__init__(params)  # pyright: ignore[reportCallIssue]
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self._predivide = gradient_predivide_factor
        self._sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        del groups  # each gradient is reduced alone
        named = _name_parameters(self, named_parameters)
        self._parameter_names = {parameter: name for name, parameter in named}
        self._handles: dict[Tensor, tuple[int | None, Any]] = {}
        self._num_passes = dict.fromkeys(self._parameter_names, 0)
        self._should_synchronize = True
        self._is_shared = process_set.included() and process_set.size() != 1
        if self._is_shared:
            self._register_hooks()

    def _register_hooks(self) -> None:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(parameter))
            for parameter in self._parameter_names
            if parameter.requires_grad
        ]

    def _make_hook(self, p: Tensor) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._handles.get(p, (None,))[0] is not None:
                raise UsageError(
                    "Gradients were computed more than backward_passes_per_step times "
                    "before call to step(). Increase backward_passes_per_step to "
                    "accumulate gradients locally."
                )
            self._num_passes[p] += 1
            if self._num_passes[p] >= self.backward_passes_per_step:
                self._handles[p] = self._allreduce_grad_async(p)

        return hook

    def _allreduce_grad_async(self, p: Tensor) -> tuple[int, Any]:
        """Start to reduce a gradient; return its handle and compression context."""
        if p.grad is None:
            p.grad = zeros_like(p)
        if self._sparse_as_dense and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
        wire, context = self._compression.compress(p.grad)
        handle = allreduce_async_(
            wire,
            name=self._parameter_names[p],
            op=self.op,
            prescale_factor=1.0 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self.process_set,
        )
        return handle, context

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; missing ones count as zeros."""
        for parameter in self._parameter_names if self._is_shared else ():
            # An overridden hook may not have started the reduction.
            handle, _ = self._handles.get(parameter, (None, None))
            if parameter.requires_grad and handle is None:
                self._handles[parameter] = self._allreduce_grad_async(parameter)
        for parameter, (handle, context) in self._handles.items():
            if handle is None:
                continue
            result = self._compression.decompress(synchronize(handle), context)
            if result is not parameter.grad and parameter.grad is not None:
                parameter.grad.copy_(result)
        self._handles.clear()
        self._num_passes = dict.fromkeys(self._parameter_names, 0)

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._should_synchronize:
            self.synchronize()
        return super(self.__class__, self).step(closure)


def _default_name(group: int, index: int) -> str:
    return f"allreduce.noname.{group}.{index}"


def plain_name(name: str) -> str:
    """Remove the prefix that ``torch.compile`` adds, as some ranks may not compile."""
    return name.replace("_orig_mod.", "")


def _name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[object] | None
) -> list[tuple[str, Tensor]]:
    """Pair each parameter with a unique name, in the order of ``optimizer``."""
    if named_parameters is None:
        return [
            (_default_name(g, i), parameter)
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        ]
    pairs: list[tuple[str, Tensor]] = []
    for item in named_parameters:
        match item:
            case (str() as name, Tensor() as parameter):
                pairs.append((plain_name(name), parameter))
            case _:
                raise UsageError(
                    "named_parameters should be a sequence of tuples (name, parameter),"
                    " usually produced by model.named_parameters()."
                )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise UsageError(
            "Parameter names in named_parameters must be unique. "
            f"Found duplicates: {', '.join(duplicates)}"
        )
    name_by_id = {id(parameter): name for name, parameter in pairs}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unnamed = [id(p) for p in parameters if id(p) not in name_by_id]
    if unnamed:
        raise UsageError(
            "named_parameters was specified, but one or more model parameters were not "
            f"named. Python object ids: {', '.join(map(str, unnamed))}"
        )
    return [(name_by_id[id(p)], p) for p in parameters]


def group_indices(
    named: Sequence[tuple[str, Tensor]],
    groups: int | Sequence[Sequence[Tensor]] | None,
    num_groups: int = 0,
) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the trained parameters in each group.

    ``groups`` is Horovod's argument: the members of each group, or a number of groups,
    which then have consecutive parameters.
    """
    if num_groups:
        warnings.warn(
            "num_groups is deprecated; use groups.", DeprecationWarning, stacklevel=3
        )
        groups = groups or num_groups
    if not groups:
        return ()
    trained = [i for i, (_, parameter) in enumerate(named) if parameter.requires_grad]
    if isinstance(groups, int):
        if groups < 0:
            raise UsageError(
                "groups should be a non-negative integer or a list of list of "
                f"torch.Tensor, got {groups}."
            )
        bounds = [0, *accumulate(rows(len(trained), groups))]
        return tuple(tuple(trained[low:high]) for low, high in pairwise(bounds))
    members: list[object] = [tensor for group in groups for tensor in group]
    if not all(isinstance(member, Tensor) for member in members):
        raise UsageError("groups must consist of torch.Tensor.")
    if len({id(member) for member in members}) != len(members):
        raise UsageError("A parameter can only appear once in groups.")
    index_of = {id(named[i][1]): i for i in trained}
    return tuple(
        tuple(index_of[id(tensor)] for tensor in group if id(tensor) in index_of)
        for group in groups
    )


def _refuse_sharded(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in named:
        if is_sharded(parameter) or getattr(parameter, "_fsdp_flattened", False):
            raise UsageError(
                "DistributedOptimizer does not support sharded parameters, got "
                f"{name}. FSDP and tensor parallelism reduce gradients themselves: use "
                "the plain optimizer."
            )


def _refuse_averaged(parameters: Iterable[Tensor]) -> None:
    """Raise if DistributedDataParallel averages the gradients of these parameters.

    DDP leaves no mark on parameters, so all objects are searched for a DDP model.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = {id(parameter) for parameter in parameters}
    for model in gc.get_objects():
        # Not isinstance(): it reads __class__, a property that may run any code.
        if not issubclass(type(model), DistributedDataParallel):
            continue
        if any(id(parameter) in own for parameter in model.parameters()):
            raise UsageError(
                "DistributedOptimizer and DistributedDataParallel cannot be used for "
                "the same model, as both average its gradients. Use the bare model, or "
                "the plain optimizer."
            )
