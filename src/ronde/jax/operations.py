"""Collectives on arrays and trees of arrays, in compiled functions and outside of them.

Argument ``effect``: False allows a collective in ``jax.checkpoint``; JAX then drops it
if its result is not used.
"""

from collections.abc import Sequence
from typing import Any

from ronde.coordination.requests import OpKind
from ronde.jax.primitive import StaticCall, bind, jax, jnp
from ronde.session.operations import Average, choose_op
from ronde.session.session import ProcessSet, global_process_set

Tree = Any  # of arrays; an array is a tree


def allreduce(
    x: Tree,
    name: str | None = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    effect: bool = True,
) -> Tree:
    """Reduce an array, or all arrays of a tree at once, over the ranks."""
    factors = prescale_factor, postscale_factor
    op = choose_op(op, None)
    call = StaticCall(OpKind.ALLREDUCE, process_set, name, op, *factors)
    return _apply(call._replace(has_effect=effect), x)


grouped_allreduce = allreduce


def broadcast(
    x: Tree,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    effect: bool = True,
) -> Tree:
    """Return ``root_rank``'s array, or all arrays of its tree; a global rank."""
    call = StaticCall(OpKind.BROADCAST, process_set, name, root_rank=root_rank)
    return _apply(call._replace(has_effect=effect), x)


def broadcast_parameters(
    tree: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Tree:
    """Return ``root_rank``'s parameters or optimizer state, as a new tree."""
    return broadcast(tree, root_rank, process_set=process_set)


def allgather(
    x: Tree,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    effect: bool = True,
) -> Tree:
    """Concatenate the arrays of all ranks by rank; scalars become vectors.

    In a compiled function the arrays must have equal shapes on all ranks; elsewhere
    their first dimensions may differ.
    """
    call = StaticCall(OpKind.ALLGATHER, process_set, name, has_effect=effect)
    return _apply(call, jax.tree.map(jnp.atleast_1d, x))


def reducescatter(
    x: Tree,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    effect: bool = True,
) -> Tree:
    """Reduce arrays over the ranks and return this rank's rows.

    In a compiled function the number of rows must be a multiple of that of the ranks.
    """
    op = choose_op(op, None)
    call = StaticCall(OpKind.REDUCESCATTER, process_set, name, op, has_effect=effect)
    return _apply(call, x)


def alltoall(
    x: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    effect: bool = True,
) -> Any:
    """Send a part of the rows to each rank, and return the received rows.

    ``splits``, which compiled functions do not allow, has the number of rows for each
    rank; the received numbers are then returned as a second array.
    """
    call = StaticCall(OpKind.ALLTOALL, process_set, name, has_effect=effect)
    if splits is None:
        return bind(call, [x])[0]
    return tuple(bind(call._replace(splits=tuple(map(int, splits))), [x]))


def _apply(call: StaticCall, tree: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, bind(call, leaves))
