"""Give every rank the same parameters, optimizer state and objects."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import (
    all_gather_object,
    broadcast_object as broadcast_object_on,
)
from ronde.errors import UsageError
from ronde.torch.exchanges import broadcast_async_, synchronize
from ronde.torch.session import current_session


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int
) -> None:
    """Copy ``root_rank``'s parameters into every rank's, in place; collective.

    Args:
        params: A ``state_dict()``, or tensors, or ``(name, tensor)`` pairs such as
            ``named_parameters()`` gives; what is not a tensor is skipped.
        root_rank: The rank to copy from.

    Raises:
        UsageError: ``params`` is nothing of these.
    """
    handles = [broadcast_async_(t, root_rank) for t in _tensors(params)]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank ``root_rank``'s optimizer state and options; collective.

    Args:
        optimizer: The same class over the same parameters on every rank; its state may
            be empty anywhere.
        root_rank: The rank to copy from.
        model: Accepted for Horovod's sake.

    Raises:
        UsageError: The optimizer is ``torch.optim.LBFGS``.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("cannot broadcast torch.optim.LBFGS state")
    is_root = current_session().communicator.rank == root_rank
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


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:  # noqa: ANN401 - anything
    """Return ``root_rank``'s object on every rank; collective.

    Args:
        obj: Anything cloudpickle takes; ignored on the other ranks.
        root_rank: The rank whose object everyone gets.
        name: Accepted for Horovod's sake.
    """
    del name
    return broadcast_object_on(current_session().communicator, obj, root_rank)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:  # noqa: ANN401 - anything
    """Return every rank's object, in rank order; collective.

    Args:
        obj: Anything cloudpickle takes.
        name: Accepted for Horovod's sake.
    """
    del name
    return all_gather_object(current_session().communicator, obj)


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


def _tensors(params: Mapping[str, Any] | Iterable[Any]) -> list[Tensor]:
    if isinstance(params, Tensor | str | bytes) or not hasattr(params, "__iter__"):
        raise UsageError(f"invalid params of type: {type(params)}")
    if isinstance(params, Mapping):
        named = cast("Mapping[str, Any]", params)
        values = [named[key] for key in sorted(named)]
    else:
        values = [_value(item) for item in params]
    return [value for value in values if isinstance(value, Tensor)]


def _value(item: Any) -> Any:  # noqa: ANN401 - the caller's own
    return cast("tuple[Any, ...]", item)[1] if isinstance(item, tuple) else item
