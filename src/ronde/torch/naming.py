"""Names and groups of an optimizer's parameters."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor
from torch.optim import Optimizer

from ronde.collectives import rows
from ronde.errors import UsageError


def name_of(group: int, index: int) -> str:
    """Return the name of a parameter that was given none."""
    return f"allreduce.noname.{group}.{index}"


def plain_name(name: str) -> str:
    """Leave out what ``torch.compile`` adds: some ranks may have compiled the model."""
    return name.replace("_orig_mod.", "")


def name_parameters(
    optimizer: Optimizer, named_parameters: Iterable[object] | None
) -> list[tuple[str, Tensor]]:
    """Pair every parameter of ``optimizer`` with a unique name, in its own order.

    Raises:
        UsageError: ``named_parameters`` are no pairs, have duplicate names, or leave a
            parameter out.
    """
    if named_parameters is None:
        return [
            (name_of(g, i), parameter)
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        ]
    pairs = [_pair(item) for item in named_parameters]
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
    """Turn Horovod's ``groups`` into indices of parameters.

    Args:
        named: The parameters.
        groups: How many near-equal consecutive groups, or the members of each; what is
            in none of them is free. Only parameters that require a gradient count.
        num_groups: Deprecated form of the number.

    Raises:
        UsageError: A number below zero, no tensor, or a tensor that is there twice.
    """
    if num_groups:
        warnings.warn(
            "num_groups is deprecated; say groups.", DeprecationWarning, stacklevel=3
        )
        groups = groups or num_groups
    if not groups:
        return ()
    trained = [i for i, (_, parameter) in enumerate(named) if parameter.requires_grad]
    if isinstance(groups, int):
        return _consecutive(trained, groups)
    members: list[object] = [tensor for group in groups for tensor in group]
    if not all(isinstance(member, Tensor) for member in members):
        raise UsageError("groups must consist of torch.Tensor.")
    if len({id(member) for member in members}) != len(members):
        raise UsageError("A parameter can only appear once in groups.")
    index_by_id = {id(named[i][1]): i for i in trained}
    found = [[index_by_id.get(id(tensor), -1) for tensor in group] for group in groups]
    return tuple(tuple(i for i in group if i >= 0) for group in found)


def _consecutive(
    indices: Sequence[int], num_groups: int
) -> tuple[tuple[int, ...], ...]:
    if num_groups < 0:
        raise UsageError(
            "groups should be a non-negative integer or a list of list of "
            f"torch.Tensor, got {num_groups}."
        )
    bounds = [0, *accumulate(rows(len(indices), num_groups))]
    return tuple(tuple(indices[low:high]) for low, high in pairwise(bounds))


def _pair(item: object) -> tuple[str, Tensor]:
    match item:
        case (str() as name, Tensor() as parameter):
            return plain_name(name), parameter
        case _:
            raise UsageError(
                "named_parameters should be a sequence of tuples (name, parameter), "
                "usually produced by model.named_parameters()."
            )
