"""Distributed optimizers of tf-keras (Keras 2), old and new ones."""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ronde.errors import UsageError
from ronde.keras.distributed import CallableList, ReductionOptions
from ronde.keras.functions import ValueFunctions
from ronde.keras.gradients import GradientReduction, is_sparse
from ronde.session.frameworks import import_framework

tf = import_framework("tensorflow")
front_end: Any = import_module("ronde.tensorflow")
functions = ValueFunctions(tf.keras, front_end, tf.convert_to_tensor)
_Keras: Any = object  # the mixin is put before a class of tf-keras


class _Accumulator:
    """Sums of gradients over several backward passes, kept in variables."""

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction
        self._passes = reduction.options.backward_passes_per_step
        self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        self._sums: list[Any] = []

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        is_local: Callable[[Any], bool],
    ) -> list[Any]:
        """Add gradients; return their sums, reduced after the last pass."""
        options = self._reduction.options
        if any(map(is_sparse, gradients)) and not options.sparse_as_dense:
            raise UsageError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 "
                "and `sparse_as_dense` is False."
            )
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        if not self._sums:
            with tf.init_scope():
                zeros = [
                    tf.zeros(variables[i].shape, variables[i].dtype) for i in given
                ]
                self._sums = [tf.Variable(zero, trainable=False) for zero in zeros]
        for i, total in zip(given, self._sums, strict=True):
            total.assign_add(tf.convert_to_tensor(gradients[i]))
        self.counter.assign_add(1)
        divisor = self._passes if options.average_aggregated_gradients else 1

        def reduced() -> list[Any]:
            means = [total / divisor for total in self._sums]
            return self._reduction.reduce(
                means, [variables[i] for i in given], is_local
            )

        def sums() -> list[Any]:
            return [tf.identity(total) for total in self._sums]

        found = iter(tf.cond(self.counter >= self._passes, reduced, sums))
        return [None if gradient is None else next(found) for gradient in gradients]

    def apply(self, apply: Callable[[], Any], optimizer: Any) -> Any:
        """Apply the reduced sums and clear them, after the last pass only."""

        def update() -> Any:
            apply()
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            self.counter.assign(0)
            return tf.identity(optimizer.iterations)

        def skip() -> Any:
            return tf.identity(optimizer.iterations.assign_add(1))

        return tf.cond(self.counter >= self._passes, update, skip)


class _ReducingOptimizer(_Keras):
    """Reduces gradients where they are computed."""

    _HAS_AGGREGATE_GRAD = True
    _reduction: GradientReduction  # of the class, so that from_config keeps it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        is_one = self._reduction.options.backward_passes_per_step == 1
        self._agg_helper = None if is_one else _Accumulator(self._reduction)
        self._local_keys = frozenset[Any]()

    @property
    def variables(self) -> CallableList:
        found: Any = super().variables
        return CallableList(found() if callable(found) else found)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local_keys |= {var.ref()}

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
        pairs = list(grads_and_vars)
        base = super()
        if self._agg_helper is None:
            return base.apply_gradients(pairs, *args, **options)
        return self._agg_helper.apply(
            lambda: base.apply_gradients(pairs, *args, **options), self
        )

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        chosen = self._agg_helper
        reduce = self._reduction.reduce if chosen is None else chosen.add
        return reduce(gradients, variables, lambda v: v.ref() in self._local_keys)


def distribute(optimizer: Any, name: str | None, options: ReductionOptions) -> Any:
    """Return a distributed copy of an optimizer of tf-keras, without its state."""
    base = type(optimizer)
    scope = name or f"Distributed{base.__name__}"
    reduction = GradientReduction(scope, options, front_end, tf.convert_to_tensor)
    facts: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_reduction": reduction,
    }
    made: Any = type(base.__name__, (_ReducingOptimizer, base), facts)
    return made.from_config(optimizer.get_config())


def copy_state(optimizer: Any, copy: Any, variables: Any) -> None:
    """Copy the state of an optimizer that has trained ``variables``."""
    build = copy.build if hasattr(copy, "build") else copy._create_all_weights  # noqa: SLF001
    build(variables)
    found: Any = optimizer.variables
    found = found() if callable(found) else found
    for target, value in zip(copy.variables, found, strict=True):
        target.assign(value)
