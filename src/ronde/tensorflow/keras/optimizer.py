"""Distributed optimizers of tf-keras (Keras 2), old and new ones."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from importlib import import_module
from typing import Any, cast

from ronde.keras.functions import CallableList, ValueFunctions
from ronde.session.frameworks import import_framework
from ronde.session.gradients import ReductionOptions
from ronde.tensorflow.gradients import OptimizerReduction

tf = import_framework("tensorflow")
front_end: Any = import_module("ronde.tensorflow")
functions = ValueFunctions(tf.keras, front_end, tf.convert_to_tensor)
_Keras: Any = object  # the mixin is put before a class of tf-keras


class _ReducingOptimizer(_Keras):
    """Reduces gradients where they are computed."""

    _HAS_AGGREGATE_GRAD = True
    # Of the class, so that from_config keeps them.
    _options: ReductionOptions
    _scope: str

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._reduction = OptimizerReduction(self._scope, self._options)
        self._agg_helper = self._reduction.helper
        self.register_local_var = self._reduction.register_local_var

    @property
    def variables(self) -> CallableList:
        return CallableList(variables_of(super()))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Any:
        tape = tf.GradientTape() if tape is None else tape
        if hasattr(super(), "_compute_gradients"):  # an old one
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = super().compute_gradients(loss, var_list, tape=tape)
        return self._reduction.reduce(pairs)

    def get_gradients(self, loss: Any, params: Any) -> Any:
        gradients = super().get_gradients(loss, params)
        pairs = self._reduction.reduce(zip(gradients, params, strict=True))
        return [gradient for gradient, _ in pairs]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs, base = list(grads_and_vars), super()
        return self._reduction.apply(
            lambda: base.apply_gradients(pairs, *args, **options), self, pairs
        )


def distribute(optimizer: Any, name: str | None, options: ReductionOptions) -> Any:
    """Return a distributed copy of an optimizer of tf-keras, without its state."""
    base = type(optimizer)
    facts: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_options": options,
        "_scope": name or f"Distributed{base.__name__}",
    }
    made: Any = type(base.__name__, (_ReducingOptimizer, base), facts)
    return made.from_config(optimizer.get_config())


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, new or legacy."""
    found: Any = optimizer.variables  # of old optimizers, a method
    return cast("list[Any]", found() if callable(found) else found)


def copy_state(optimizer: Any, copy: Any, variables: Any) -> None:
    """Copy the state of an optimizer that has trained ``variables``."""
    build = copy.build if hasattr(copy, "build") else copy._create_all_weights
    build(variables)
    for target, value in zip(copy.variables, variables_of(optimizer), strict=True):
        target.assign(value)
