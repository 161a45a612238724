"""Give every rank the same parameters, optimizer state and objects."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import Work
from ronde.collectives.objects import (
    all_gather_object,
    broadcast_object as broadcast_object_by,
)
from ronde.errors import UsageError
from ronde.torch.autograd import Broadcast, Gather, start, start_in_place
from ronde.torch.process_sets import ProcessSet, global_process_set
from ronde.torch.session import rank
from ronde.torch.submission import member_of
from ronde.torch.works import Only


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int
) -> None:
    """Copy ``root_rank``'s parameters into every rank's, in place; collective.

    Args:
        params: A ``state_dict()``, or tensors, or ``(name, tensor)`` pairs such as
            ``named_parameters()`` gives; what is not a tensor is skipped. Those that
            have no name are matched by their order.
        root_rank: The rank to copy from.

    Raises:
        UsageError: ``params`` is nothing of these, or two have one name.
        CollectiveError: Ranks differ in a shape or dtype, or one is gone.
    """
    works = [
        start_in_place(Broadcast(root_rank, name, global_process_set), (tensor,))
        for name, tensor in _named_tensors(params)
    ]
    for work in works:
        work.wait()


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank ``root_rank``'s optimizer state and options; collective.

    As Horovod leaves it, parameters that have no gradient yet have one of zeros where
    the optimizer had no state; Horovod took a step on those.

    Args:
        optimizer: The same class over the same parameters on every rank; its state may
            be empty anywhere.
        root_rank: The rank to copy from.
        model: Says which parameters are sparse embeddings and stay without.

    Raises:
        UsageError: The optimizer is ``torch.optim.LBFGS``.
        CollectiveError: A rank is gone.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _make_gradients(optimizer, model)
    is_root = rank() == root_rank
    tensors: list[Tensor] = []
    skeleton = _take_tensors(optimizer.state_dict(), tensors) if is_root else None
    skeleton, shapes = broadcast_object(
        (skeleton, [_Shape.of(tensor) for tensor in tensors]), root_rank
    )
    if not is_root:
        tensors = [shape.empty() for shape in shapes]
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(_put_tensors(skeleton, tensors))


def broadcast_object(
    obj: Any,  # noqa: ANN401  anything
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # noqa: ANN401  anything
    """Return ``root_rank``'s object on every rank of the set; collective.

    Args:
        obj: Anything cloudpickle takes; ignored on the other ranks.
        root_rank: The rank whose object everyone gets, among all ranks.
        name: Matches the ranks' calls; without one, their order does. (Horovod takes
            the name of the object's class, which may differ from rank to rank.)
        process_set: The ranks that take part.

    Raises:
        UsageError: The set is not there, or without this rank or ``root_rank``.
        CollectiveError: The root could not pickle its object, or a rank is gone.
    """
    return broadcast_object_by(_Carrier(name or "", process_set), obj, root_rank)


def allgather_object(
    obj: Any,  # noqa: ANN401  anything
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return every rank's object, in rank order; collective.

    Args:
        obj: Anything cloudpickle takes.
        name: As of ``broadcast_object``.
        process_set: The ranks that take part.

    Raises:
        UsageError: The set is not there, or without this rank.
        CollectiveError: A rank could not pickle its object, or is gone.
    """
    return all_gather_object(_Carrier(name or "", process_set), obj)


def _make_gradients(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    modules = () if model is None else model.modules()
    embeddings = [m for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse]
    sparse = {id(embedding.weight) for embedding in embeddings}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_bare = parameter.requires_grad and parameter.grad is None
            if is_bare and id(parameter) not in sparse:
                parameter.grad = torch.zeros_like(parameter)


class _Carrier:
    """Carries the bytes of one object by named collectives, ranks among all."""

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        member = member_of(process_set, "Broadcast")
        self.rank = member.ranks[member.rank]
        self.size = len(member.ranks)
        self._process_set = process_set
        self._names = iter([name and f"{name}.sz", name and f"{name}.t"])

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy the length, then the bytes, from ``root``."""
        part = Broadcast(root, next(self._names), self._process_set)
        return Only(start_in_place(part, (tensor,)))

    def all_gather(self, tensor: Tensor) -> Work[Tensor]:
        """Gather length and bytes in one."""
        return Only(start(Gather(next(self._names), self._process_set), (tensor,)))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a rank must know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> "_Shape":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device_type)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the tensor of that number in a structure that is sent as an object."""

    number: int


def _take_tensors(value: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - a tree
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    return _map_children(value, lambda child: _take_tensors(child, tensors))


def _put_tensors(value: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - a tree
    if isinstance(value, _Place):
        return tensors[value.number]
    return _map_children(value, lambda child: _put_tensors(child, tensors))


def _map_children(value: Any, function: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a tree
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {key: function(child) for key, child in items}
    if isinstance(value, list | tuple):
        children = cast("list[Any] | tuple[Any, ...]", value)
        return type(children)([function(child) for child in children])
    return value


def _named_tensors(
    params: Mapping[str, Any] | Iterable[Any],
) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor | str | bytes) or not hasattr(params, "__iter__"):
        raise UsageError(f"invalid params of type: {type(params)}")
    if isinstance(params, Mapping):
        named = cast("Mapping[str, Any]", params)
        pairs: list[tuple[Any, Any]] = sorted(named.items(), key=_key)
    else:
        pairs = [_pair(item) for item in params]
    return [(str(n or ""), t) for n, t in pairs if isinstance(t, Tensor)]


def _key(item: tuple[str, Any]) -> str:
    return item[0]


def _pair(item: Any) -> tuple[Any, Any]:  # noqa: ANN401 - the caller's own
    return cast("tuple[Any, Any]", item) if isinstance(item, tuple) else ("", item)
