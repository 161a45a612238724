"""Distributed optimizers of tf-keras (Keras 2), old and new ones."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

from ronde.keras.distributed import CallableList, ReductionOptions
from ronde.keras.functions import ValueFunctions
from ronde.session.frameworks import import_framework
from ronde.tensorflow.aggregation import (
    AllreduceGrads,
    LocalGradientAggregationHelperEager,
    LocalVariables,
)
from ronde.tensorflow.gradients import (
    _make_allreduce_grads_fn as make_allreduce,  # pyright: ignore[reportPrivateUsage]
)

tf = import_framework("tensorflow")
front_end: Any = import_module("ronde.tensorflow")
functions = ValueFunctions(tf.keras, front_end, tf.convert_to_tensor)
_Keras: Any = object  # the mixin is put before a class of tf-keras


class _ReducingOptimizer(_Keras):
    """Reduces gradients where they are computed."""

    _HAS_AGGREGATE_GRAD = True
    # Of the class, so that from_config keeps them.
    _options: ReductionOptions
    _allreduce_grads: AllreduceGrads

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        options, self._agg_helper = self._options, None
        is_scaled = options.scale_local_gradients
        self._local = LocalVariables(options.process_set, is_scaled=is_scaled)
        if options.backward_passes_per_step > 1:
            self._agg_helper = LocalGradientAggregationHelperEager(
                options.backward_passes_per_step,
                self._allreduce_grads,
                options.sparse_as_dense,
                options.average_aggregated_gradients,
                options.process_set,
                is_scaled,
            )

    @property
    def variables(self) -> CallableList:
        return CallableList(variables_of(super()))

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local.add(var)
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)

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
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._reduced(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> Any:
        return self._reduced(super().get_gradients(loss, params), params)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs, base = list(grads_and_vars), super()
        if self._agg_helper is None:
            return base.apply_gradients(pairs, *args, **options)
        return self._agg_helper.apply_gradients(
            lambda: base.apply_gradients(pairs, *args, **options), self, pairs
        )

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        if self._agg_helper is not None:
            return self._agg_helper.compute_gradients(gradients, variables)
        reduce = self._allreduce_grads
        return self._local.reduce_others(reduce, gradients, variables)


def distribute(optimizer: Any, name: str | None, options: ReductionOptions) -> Any:
    """Return a distributed copy of an optimizer of tf-keras, without its state."""
    base = type(optimizer)
    reduce = make_allreduce(
        name or f"Distributed{base.__name__}",
        "",
        "",
        options.compression or functions.Compression.none,
        options.sparse_as_dense,
        options.op,
        options.gradient_predivide_factor,
        options.groups,
        options.process_set,
    )
    facts: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_options": options,
        "_allreduce_grads": staticmethod(reduce),
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
