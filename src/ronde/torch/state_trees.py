"""State dicts as JSON and a list of tensors."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ronde.errors import UsageError


def split_tree(value: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - a tree
    """Return a tree as JSON values; append its tensors to ``tensors``.

    Pickle is avoided, as loading it can run code.
    """
    match value:
        case Tensor():
            tensors.append(value)
            shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
            return {"tensor": [shape, dtype, value.device.type]}
        case dict():
            items = cast("dict[Any, Any]", value).items()
            return {"dict": [[split_tree(each, tensors) for each in i] for i in items]}
        case list() | tuple():
            children = cast("list[Any] | tuple[Any, ...]", value)
            name = "list" if isinstance(value, list) else "tuple"
            return {name: [split_tree(child, tensors) for child in children]}
        case np.generic():  # before float, which np.float64 is
            scalar = cast("Any", value)
            return {"numpy": [str(scalar.dtype), scalar.item()]}
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise UsageError(
                "an optimizer's state must consist of tensors, numbers and strings, "
                f"got {type(value).__name__}. Broadcast it as an object: "
                "optimizer.load_state_dict(broadcast_object(optimizer.state_dict()))"
            )


def rebuild_tree(plain: Any, tensors: list[Tensor], device: str | None = None) -> Any:  # noqa: ANN401 - a tree
    """Return the tree with uninitialised tensors, which are appended to ``tensors``.

    The tensors are on ``device``, or by default on the original device types.
    """
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = cast("dict[str, list[Any]]", plain).items()
    if kind == "tensor":
        shape, dtype, was_on = content
        dtype = getattr(torch, dtype)
        tensor = torch.empty(shape, dtype=dtype, device=device or was_on)
        tensors.append(tensor)
        return tensor
    if kind == "numpy":
        dtype, item = content
        return np.dtype(dtype).type(item)
    if kind == "dict":
        return dict(
            [rebuild_tree(each, tensors, device) for each in pair] for pair in content
        )
    children = [rebuild_tree(child, tensors, device) for child in content]
    return tuple(children) if kind == "tuple" else children
