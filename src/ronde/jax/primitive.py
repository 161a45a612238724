"""The primitive of JAX that all collectives are, with its rules of transformation.

Note [Names]
    In a compiled function a collective is matched by its name: the user's, or the name
    of the function and the collective's number in it. Numbers are given when JAX lowers
    the function, in the order in which it was traced. So ranks match that trace their
    functions a different number of times. Outside of compiled functions unnamed
    collectives are matched by the order of the calls.

Note [Effects]
    XLA runs independent calls in an order of its own, which constants such as the rank
    can change. Each call waits for all ranks, so ranks with different orders would wait
    for ever. Collectives have an *ordered* effect: a token is passed from one call to
    the next, in the order of the program. So none is dropped either, if its result is
    not used. JAX refuses effects in ``jax.checkpoint``; with ``effect=False`` the order
    is XLA's, so such a function should have one collective at a time.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ronde.collectives.arithmetic import COMPLEX, FLOATS, INTEGERS
from ronde.coordination.requests import OpKind
from ronde.errors import MismatchError, UsageError
from ronde.jax import ffi
from ronde.jax.ffi import jax
from ronde.session.operations import (
    Allgather,
    Allreduce,
    Alltoall,
    Average,
    Broadcast,
    NamedCollective,
    Reducescatter,
    Sum,
)
from ronde.session.session import ProcessSet, state_of

core: Any = import_module("jax.extend.core")
ad: Any = import_module("jax.interpreters.ad")
batching: Any = import_module("jax.interpreters.batching")
mlir: Any = import_module("jax.interpreters.mlir")
effects: Any = import_module("jax._src.effects")  # no public way to order calls
jnp: Any = jax.numpy

Arrays = Sequence[Any]
_IN_PLACE = (OpKind.ALLREDUCE, OpKind.BROADCAST)
"""Collectives whose results have the shapes of their arguments."""
_DTYPES = FLOATS | INTEGERS | COMPLEX | {torch.bool}


class StaticCall(NamedTuple):
    """The facts of a collective that a compiled function holds."""

    kind: OpKind
    process_set: ProcessSet
    name: str | None = None
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = 0
    splits: tuple[int, ...] | None = None  # outside of compiled functions only
    has_effect: bool = True

    def collective(self, name: str | None, num_tensors: int) -> NamedCollective:
        """Return the session's collective."""
        process_set, is_group = self.process_set, num_tensors > 1
        match self.kind:
            case OpKind.ALLGATHER:
                return Allgather(process_set, name, is_group)
            case OpKind.ALLTOALL:
                return Alltoall(process_set, name, splits=self.splits)
            case OpKind.BROADCAST:
                return Broadcast(process_set, name, is_group, root_rank=self.root_rank)
            case _:
                is_whole = self.kind is OpKind.ALLREDUCE
                reduction = Allreduce if is_whole else Reducescatter
                scaling = self.op, self.prescale, self.postscale
                return reduction(process_set, name, is_group, *scaling)

    def num_ranks(self) -> int:
        """Return the number of ranks of the process set."""
        return len(state_of(self.process_set, self.kind).ranks)

    def derived(self, suffix: str) -> "StaticCall":
        """Return the call for tangents or gradients, with a name of its own."""
        name = self.name and f"{self.name}_{suffix}"
        return self._replace(name=name)


class Site:
    """A collective in a compiled function: all but the addresses of the arrays."""

    def __init__(self, call: StaticCall, name: str, given: Arrays, new: Arrays) -> None:
        """``given`` and ``new`` have the shapes and dtypes of arguments and results."""
        self._call = call
        self._collective = call.collective(name, len(given))
        self._given, self._new = _specs(given), _specs(new)
        # The number is the same in all processes, for compilation caches.
        facts = (*call[3:], call.kind.name, call.process_set.ranks, name)
        text = repr((facts, call.process_set.process_set_id, self._given))
        self.number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])

    def run_at(self, given: ffi.Addresses, new: ffi.Addresses) -> None:
        """Run on memory of XLA; the first address of each is the token's."""
        arguments = [*map(ffi.tensor_at, given[1:], *self._given)]
        self.run(arguments, [*map(ffi.tensor_at, new[1:], *self._new)])

    def run(self, arguments: list[Tensor], results: list[Tensor]) -> None:
        """Run on tensors; those that share memory are the same."""
        collective, call = self._collective, self._call
        if call.kind in _IN_PLACE:
            for argument, result in zip(arguments, results, strict=True):
                if argument is not result:
                    result.copy_(argument)
            collective.run(results, in_place=True)
            return
        if call.kind is not OpKind.REDUCESCATTER:
            # The ranks compare all dimensions except the first.
            parts = call.num_ranks() if call.kind is OpKind.ALLTOALL else 1
            arguments = [
                each.view(parts, each.shape[0] // parts, *each.shape[1:])
                for each in arguments
            ]
        try:
            received = collective.run(arguments)
        except MismatchError as error:
            raise UsageError(
                "arrays must have equal shapes on all ranks in a compiled function. "
                f"Gather arrays with different rows outside of jit.\n{error}"
            ) from None
        # An exchange of rows also returns the numbers of rows.
        for each, result in zip(received, results, strict=False):
            result.copy_(each.view(result.shape))


def _specs(avals: Arrays) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
    """Return the shapes and the dtypes."""
    dtypes = [getattr(torch, aval.dtype.name, None) for aval in avals]
    for dtype, aval in zip(dtypes, avals, strict=True):
        if dtype not in _DTYPES:
            raise UsageError(
                "arrays must be of a dtype that torch has, except 8-bit floats, got "
                f"{aval.dtype.name}. Convert them with astype()."
            )
    return [aval.shape for aval in avals], cast("list[torch.dtype]", dtypes)


class _Numbers(Counter[str]):
    """The collectives so far in a module that is being lowered."""


collective_p: Any = core.Primitive("ronde_collective")
collective_p.multiple_results = True


def bind(call: StaticCall, arrays: Arrays) -> list[Any]:
    """Apply a collective to arrays or tracers; return as many results."""
    if not arrays:
        return []
    is_ffi = jax.default_backend() == "cpu" and ffi.is_usable()
    return collective_p.bind(*map(jnp.asarray, arrays), call=call, is_ffi=is_ffi)


@collective_p.def_impl
def _run_now(*arrays: Any, call: StaticCall, is_ffi: bool) -> list[Any]:
    """Run on concrete arrays; inputs and results share torch's memory."""
    del is_ffi
    tensors = [torch.from_dlpack(array) for array in arrays]
    results = call.collective(call.name, len(tensors)).run(tensors)
    if call.kind is OpKind.ALLTOALL and call.splits is None:
        results = results[:1]
    return [jnp.from_dlpack(result) for result in results]


@collective_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, call: StaticCall, is_ffi: bool
) -> tuple[list[Any], Any]:
    if call.splits is not None:
        raise UsageError(
            "splits must be None in a compiled function. Send equal parts."
        )
    results = [
        aval.update(shape=_shape(call, aval.shape), weak_type=False) for aval in avals
    ]
    return results, _effects(is_ffi) if call.has_effect else core.no_effects


def _shape(call: StaticCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    size = call.num_ranks()
    if call.kind in _IN_PLACE:
        return shape
    if call.kind is OpKind.ALLGATHER:
        return (size * shape[0], *shape[1:])
    if not shape or shape[0] % size:
        raise UsageError(
            "in a compiled function the first dimension must be a multiple of the "
            f"number of ranks, {size}, got an array of shape {list(shape)}."
        )
    is_scatter = call.kind is OpKind.REDUCESCATTER
    return (shape[0] // size, *shape[1:]) if is_scatter else shape


class _Order(effects.Effect):
    """The effect that puts collectives in the order of the program."""

    def __str__(self) -> str:
        return "ronde"


order = _Order()
for _kinds in (
    "lowerable",
    "ordered",
    "control_flow_allowed",
    "custom_derivatives_allowed",
):
    getattr(effects, f"{_kinds}_effects").add_type(_Order)


@cache
def _effects(is_ffi: bool) -> Any:
    if is_ffi:
        return frozenset([order])
    none: tuple[Any, ...] = ()
    call = partial(jax.experimental.io_callback, lambda: none, none, ordered=True)
    return jax.make_jaxpr(call)().effects


def _lower(ctx: Any, *operands: Any, call: StaticCall, is_ffi: bool) -> Any:
    name = call.name or _next_name(ctx.module_context)
    site = Site(call, name, ctx.avals_in, ctx.avals_out)
    if not is_ffi:
        return mlir.lower_fun(_call_back)(ctx, *operands, call=call, site=site)
    ffi.register_operation(site.number, site.run_at)
    # The first operand and the first result are the token.
    num_aliases = len(operands) if call.kind in _IN_PLACE else 0
    lowering = ffi.lowering(range(1, num_aliases + 1), has_effect=call.has_effect)
    token = jax.typeof(jax.lax.create_token())
    inner = ctx.replace(
        avals_in=[token, *ctx.avals_in], avals_out=[token, *ctx.avals_out]
    )
    tokens = ctx.tokens_in if call.has_effect else mlir.TokenSet.create([order])
    given = tokens.get(order)
    next_token, *results = lowering(inner, given, *operands, operation=site.number)
    if call.has_effect:
        tokens = tokens.update_tokens(mlir.TokenSet({order: next_token}))
        ctx.set_tokens_out(tokens)
    return results


# Not cached: each collective of a module has a number of its own.
mlir.register_lowering(collective_p, _lower, cacheable=False)


def _next_name(module: Any) -> str:
    found = (each for each in module.keepalives if isinstance(each, _Numbers))
    numbers = next(found, None)
    if numbers is None:
        numbers = _Numbers()
        module.keepalives.append(numbers)  # shared by the contexts of one module
    numbers[""] += 1
    function = module.module.operation.attributes["sym_name"].value
    return f"{function}.{numbers['']}"


def _call_back(*arrays: Any, call: StaticCall, site: Site) -> Any:
    """Run through a callback, where the handler cannot be used; copies the arrays."""
    shapes = [
        jax.ShapeDtypeStruct(_shape(call, array.shape), array.dtype) for array in arrays
    ]

    def run(*given: Any) -> list[Any]:
        tensors = [torch.from_dlpack(array).cpu() for array in given]
        bits = [
            torch.empty(shape.shape, dtype=tensor.dtype)
            for shape, tensor in zip(shapes, tensors, strict=True)
        ]
        site.run(tensors, bits)
        bits = [
            each.view(torch.int16) if each.dtype is torch.bfloat16 else each
            for each in bits
        ]  # NumPy has no bfloat16
        return [
            each.numpy().view(shape.dtype)
            for each, shape in zip(bits, shapes, strict=True)
        ]

    if call.has_effect:
        return jax.experimental.io_callback(run, shapes, *arrays, ordered=True)
    return jax.pure_callback(run, shapes, *arrays)


def _jvp(
    primals: Arrays, tangents: Arrays, *, call: StaticCall, is_ffi: bool
) -> tuple[list[Any], list[Any]]:
    results = collective_p.bind(*primals, call=call, is_ffi=is_ffi)
    derivatives = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    moving = [i for i, each in enumerate(tangents) if type(each) is not ad.Zero]
    if not moving:
        return results, derivatives
    if call.op not in (Average, Sum):
        raise UsageError("op must be Average or Sum in a function to differentiate.")
    given = [ad.instantiate_zeros(tangents[i]) for i in moving]
    moved = collective_p.bind(*given, call=call.derived("tangent"), is_ffi=is_ffi)
    for i, derivative in zip(moving, moved, strict=True):
        derivatives[i] = derivative
    return results, derivatives


def _transpose(
    gradients: Arrays, *arrays: Any, call: StaticCall, is_ffi: bool
) -> list[Any]:
    """Return the gradients of the arguments; the rules are those of ``ronde.torch``."""
    del arrays, is_ffi
    given = [ad.instantiate_zeros(each) for each in gradients]
    call = call.derived("gradient")
    plain = call._replace(op=Average, prescale=1.0, postscale=1.0)
    match call.kind:
        case OpKind.ALLGATHER:  # this rank's rows of the averaged gradients
            return bind(plain._replace(kind=OpKind.REDUCESCATTER), given)
        case OpKind.BROADCAST:  # the average at the root, zero elsewhere
            averaged = bind(plain._replace(kind=OpKind.ALLREDUCE), given)
            state = state_of(call.process_set, call.kind)
            is_root = state.ranks[state.rank] == call.root_rank
            return [each * is_root for each in averaged]  # never dropped
        case OpKind.REDUCESCATTER:  # gathered
            factor = call.prescale * call.postscale
            factor *= call.num_ranks() if call.op == Sum else 1
            scaled = [each * jnp.asarray(factor, each.dtype) for each in given]
            return bind(plain._replace(kind=OpKind.ALLGATHER), scaled)
        case _:  # the same reduction, or each row to its sender
            return bind(call, given)


def _batch(
    arrays: Arrays, dims: Sequence[int | None], *, call: StaticCall, is_ffi: bool
) -> tuple[list[Any], list[int | None]]:
    """Run on the batches; where rows are exchanged, the batch becomes dimension 1."""
    if call.kind not in _IN_PLACE:
        arrays = [
            array if dim is None else jnp.moveaxis(array, dim, 1)
            for array, dim in zip(arrays, dims, strict=True)
        ]
        dims = [None if dim is None else 1 for dim in dims]
    return collective_p.bind(*arrays, call=call, is_ffi=is_ffi), list(dims)


ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
