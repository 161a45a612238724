"""Compilation of whole functions with collectives.

Note [Whole functions]
    JAX passes the token of an effect (Note [Effects]) from one compiled function to the
    next. It calls such functions in Python, which takes longer than a small reduction,
    and more with each array. ``jit`` puts the function into a primitive without an
    effect. Its lowering makes the token, so collectives inside are ordered as always.
    A thread's functions run in the order of its calls: XLA's CPU client ensures it.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from ronde.errors import UsageError
from ronde.jax.primitive import core, jax, mlir, order

partial_eval: Any = import_module("jax.interpreters.partial_eval")
function_p: Any = core.Primitive("ronde_function")
function_p.multiple_results = True


def jit(fun: Callable[..., Any], **options: Any) -> Any:
    """Return ``jax.jit(fun, **options)``, which is faster if ``fun`` has collectives.

    The result cannot be called in another compiled function or be transformed.
    """

    @wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        moving = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
        if not moving:
            return fun(*args, **kwargs)

        def call(*arrays: Any) -> Any:
            for i, array in zip(moving, arrays, strict=True):
                leaves[i] = array
            args, kwargs = structure.unflatten(leaves)
            return fun(*args, **kwargs)

        given = [leaves[i] for i in moving]
        closed, shapes = jax.make_jaxpr(call, return_shape=True)(*given)
        results = function_p.bind(*given, call_jaxpr=closed)
        return jax.tree.structure(shapes).unflatten(results)

    return jax.jit(run, **options)


@function_p.def_effectful_abstract_eval
def _abstract_eval(*_: Any, call_jaxpr: Any) -> tuple[list[Any], Any]:
    return call_jaxpr.out_avals, call_jaxpr.effects - {order}


def _lower(ctx: Any, *operands: Any, call_jaxpr: Any) -> Any:
    function = mlir.ir.InsertionPoint.current.block.owner
    if function.attributes["sym_name"].value != "main":
        raise UsageError(
            "hvd.jit must compile the outermost function, got one inside of another "
            "compiled function. Use jax.jit inside."
        )
    given, new = ctx.tokens_in.items(), mlir.TokenSet.create([order]).items()
    inner = ctx.replace(tokens_in=mlir.TokenSet(dict([*given, *new])))
    results = mlir.core_call_lowering(
        inner, *operands, name="ordered", call_jaxpr=call_jaxpr
    )
    ctx.set_tokens_out(inner.tokens_out.subset([effect for effect, _ in given]))
    return results


def _keep(_: list[bool], equation: Any) -> tuple[list[bool], Any]:
    """Never drop a function, as other ranks may use its results."""
    return [True] * len(equation.invars), equation


mlir.register_lowering(function_p, _lower, cacheable=False)
partial_eval.dce_rules[function_p] = _keep
