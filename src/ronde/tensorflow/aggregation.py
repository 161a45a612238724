"""Local sums of gradients over several passes."""

from collections.abc import Callable, Iterable
from typing import Any

from ronde.errors import UsageError
from ronde.session.frameworks import import_framework
from ronde.session.gradients import LocalVariables, ReductionOptions, is_sparse
from ronde.session.session import ProcessSet, current_session, global_process_set
from ronde.tensorflow.mpi_ops import size_op

tf = import_framework("tensorflow")

AllreduceGrads = Callable[..., list[Any]]
"""Takes gradients and their variables; returns the reduced gradients."""


def local_variables(options: ReductionOptions) -> LocalVariables:
    """Return an empty set of local variables; ``size_op`` divides in elastic graphs."""
    process_set = options.process_set

    def divide(values: Any) -> Any:
        if current_session().is_of_views:  # a graph outlives the view
            size = size_op(process_set.process_set_id or 0)
        else:
            size = process_set.size()
        return values / tf.cast(size, values.dtype)

    return LocalVariables(options, divide)


def state_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Return a variable of zeros that is neither trained nor saved.

    In a graph of TensorFlow 1, ``local_variables_initializer`` initializes it.
    """
    with tf.init_scope():
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype),
            trainable=False,
            name=name,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )


def choose(
    condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]
) -> Any:
    """Run one of two functions for its effect; in a graph, return a tensor to run."""
    if tf.executing_eagerly():
        return then() if condition else otherwise()

    def after(run: Callable[[], Any]) -> Callable[[], Any]:
        def branch() -> Any:
            result = run()
            with tf.control_dependencies([] if result is None else [result]):
                return tf.constant(True)

        return branch

    return tf.cond(condition, after(then), after(otherwise))


class LocalGradientAggregationHelperEager:
    """Sums gradients over some passes and reduces the sums in the last of them.

    Works eagerly, in a ``tf.function`` and in a graph of TensorFlow 1. In the passes
    before the last, the result is the local sum. A last group of fewer passes stays
    in ``locally_aggregated_grads``, by the gradient's index.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: AllreduceGrads,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if backward_passes_per_step <= 0:
            raise UsageError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.locally_aggregated_grads: dict[int, Any] = {}
        self.counter = state_variable("aggregation_counter", (), tf.int32)
        options = ReductionOptions(
            process_set=process_set, scale_local_gradients=scale_local_gradients
        )
        self._local = local_variables(options)

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local.add(var)

    def compute_gradients(
        self,
        grads: Iterable[Any],
        vars: Iterable[Any],  # noqa: A002
    ) -> list[Any]:
        """Add gradients to the local sums; return these, reduced in the last pass."""
        results, variables = list(grads), list(vars)
        given = [i for i, gradient in enumerate(results) if gradient is not None]
        sums = [self._sum_of(i, variables[i], results[i].dtype) for i in given]
        dense = [self._dense(results[i]) for i in given]
        added = [s.assign_add(g) for s, g in zip(sums, dense, strict=True)]
        with tf.control_dependencies(added):
            count = self.counter.assign_add(1)
        with tf.control_dependencies([count]):
            found = tf.cond(
                tf.equal(count, self.backward_passes_per_step),
                lambda: self._reduce(sums, [variables[i] for i in given]),
                lambda: [each.read_value() for each in sums],
            )
        for i, gradient in zip(given, _listed(found), strict=True):
            results[i] = gradient
        return results

    def apply_gradients(
        self,
        apply_grads_closure: Callable[[], Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the closure after a last pass; after others, only count the step.

        Steps are counted in the optimizer's ``iterations`` and in ``global_step``.
        """
        counters = [getattr(optimizer, "iterations", None), kwargs.get("global_step")]

        def count_step() -> Any:
            return tf.group(*[c.assign_add(1) for c in counters if c is not None])

        pairs: Any = args[0] if args else ()
        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            is_reduced = tf.equal(self.counter.read_value(), 0)
            return choose(is_reduced, apply_grads_closure, count_step)

    def _dense(self, gradient: Any) -> Any:
        if not is_sparse(gradient):
            return gradient
        if not self.sparse_as_dense:
            raise UsageError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 "
                "and `sparse_as_dense` is False."
            )
        return tf.convert_to_tensor(gradient)

    def _sum_of(self, index: int, variable: Any, dtype: Any) -> Any:
        if index not in self.locally_aggregated_grads:
            name = f"aggregated_gradient_{index}"
            made = state_variable(name, variable.shape, dtype)
            self.locally_aggregated_grads[index] = made
        return self.locally_aggregated_grads[index]

    def _reduce(self, sums: list[Any], variables: list[Any]) -> list[Any]:
        values = [tf.identity(each.read_value()) for each in sums]
        reduced = self._local.reduce_others(self.allreduce_grads, values, variables)
        # In a graph of TensorFlow 1, only what is named here runs in this order.
        with tf.control_dependencies([*values, *reduced]):
            cleared = [each.assign(tf.zeros_like(each)) for each in sums]
            cleared.append(self.counter.assign(0))
        is_mean = self.average_aggregated_gradients
        divisor = self.backward_passes_per_step if is_mean else 1
        with tf.control_dependencies(cleared):
            return [each / tf.cast(divisor, each.dtype) for each in reduced]


class LocalGradientAggregationHelper(LocalGradientAggregationHelperEager):
    """The same with Horovod's arguments for graphs; ``rank`` and others are ignored."""

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: AllreduceGrads,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        del rank
        options = (sparse_as_dense, average_aggregated_gradients)
        options = (*options, process_set, scale_local_gradients)
        super().__init__(backward_passes_per_step, allreduce_func, *options)
        self.name, self.optimizer_type = name, optimizer_type


def _listed(found: Any) -> Any:
    # tf.cond unpacks a list of one tensor in graphs.
    return [found] if tf.is_tensor(found) else found
