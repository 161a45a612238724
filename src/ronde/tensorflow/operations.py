"""Collectives of the session on TensorFlow's tensors, eagerly and in graphs.

Note [Graphs]
    In a graph a collective, also of many tensors, is one stateful ``tf.py_function``,
    which blocks until the collective is complete. TensorFlow runs such functions in
    the order in which they were traced, so all ranks must trace them in the same order.
    They are matched by name: the node's name in the graph, which is the same on ranks
    that trace their functions a different number of times. The session is looked up
    when the function is called, as ``init()`` may have been called again since.

Note [Errors]
    Called eagerly, a collective raises TensorFlow's class of error. ``py_function``
    knows only three classes, so a graph gets FailedPreconditionError, for ranks that do
    not fit together, in another way: the function returns that it failed, and the graph
    then reads a variable that does not exist. The log has the text.

Note [Threads]
    A collective in a graph holds one of TensorFlow's inter-op threads while it waits.
    One is enough for a ``tf.function``, and more threads than cores make all of a step
    slower. A session of TensorFlow 1 runs several collectives at a time.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from torch.utils.dlpack import from_dlpack as from_capsule, to_dlpack

from ronde.coordination.requests import OpKind
from ronde.errors import CollectiveError, MismatchError, UsageError
from ronde.session.frameworks import import_framework
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
from ronde.session.session import state_of

tf: Any = import_framework("tensorflow")

_record: Any = import_module("tensorflow.python.eager.record")
Tensors = Sequence[Any]  # TensorFlow's
_logger = logging.getLogger("ronde")
_UNSAFE = re.compile(r"[^A-Za-z0-9_]")
_WITH_ROWS = (Allgather, Alltoall, Reducescatter)
"""Collectives that change the number of rows."""
_MISMATCH = "ranks_do_not_fit_together_the_log_has_the_reason"


@tf.autograph.experimental.do_not_convert
def run(
    collective: NamedCollective, tensors: Tensors, *, is_differentiable: bool = True
) -> list[Any]:
    """Run a collective on tensors, and return its results.

    The second tensor of an ``Alltoall`` has the splits, if there are two.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    _require_single_replica()
    if not tf.executing_eagerly():
        collective = replace(collective, name=_graph_name(collective, tensors))
    elif not _record.could_possibly_record():  # no tape; making a gradient takes time
        is_differentiable = False
    if not is_differentiable:
        return _run(collective, tensors)

    @tf.custom_gradient
    def forward(*inputs: Any) -> Any:
        results = _run(collective, inputs)

        def backward(*gradients: Any) -> list[Any]:
            return _differentiate(collective, inputs, results, gradients)

        return tuple(results), backward

    return list(forward(*tensors))


def _require_single_replica() -> None:
    if not tf.distribute.has_strategy():
        return
    devices = tf.distribute.get_strategy().extended.worker_devices
    if len(devices) > 1:
        raise UsageError(
            "The tf.distribute strategy of a collective must have one replica in this "
            f"process, got {len(devices)}. Start a rank for each replica."
        )


def _run(collective: NamedCollective, tensors: Tensors) -> list[Any]:
    if tf.executing_eagerly():
        try:
            return _execute(collective, tensors)
        except UsageError as error:
            raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
        except MismatchError as error:
            raise tf.errors.FailedPreconditionError(None, None, str(error)) from error
        except CollectiveError as error:
            text = f"{_label(collective)}: {error}"
            raise tf.errors.UnknownError(None, None, text) from error
    return _in_graph(collective, tensors)


def _execute(collective: NamedCollective, tensors: Tensors) -> list[Any]:
    """Run a collective on eager tensors; inputs and results share torch's memory."""
    capsule_of = tf.experimental.dlpack.to_dlpack
    given = [from_capsule(capsule_of(tensor)) for tensor in tensors]
    if isinstance(collective, Alltoall) and len(given) > 1:
        collective = replace(collective, splits=given.pop())
    from_dlpack = tf.experimental.dlpack.from_dlpack
    return [from_dlpack(to_dlpack(result)) for result in collective.run(given)]


def _in_graph(collective: NamedCollective, tensors: Tensors) -> list[Any]:
    dtypes = [tensor.dtype.base_dtype for tensor in tensors]
    if isinstance(collective, Alltoall):
        dtypes = [dtypes[0], tf.int32]

    def body(*inputs: Any) -> list[Any]:
        try:
            return [*_execute(collective, inputs), tf.constant(value=True)]
        except MismatchError as error:
            _logger.warning("%s: %s", _label(collective), error)
            return [
                *(tf.zeros([0], dtype) for dtype in dtypes),
                tf.constant(value=False),
            ]
        except CollectiveError as error:
            raise CollectiveError(f"{_label(collective)}: {error}") from error

    # In the current scope, which the collective's name has already.
    name = str(collective.name).rpartition("/")[2]
    *results, is_matched = tf.py_function(
        body, list(tensors), [*dtypes, tf.bool], name=name
    )
    is_matched.set_shape([])
    # Without the identity the call may not run, and its error is lost.
    with tf.control_dependencies([tf.identity(_require_match(is_matched))]):
        results = [tf.identity(result) for result in results]
    for result, shape in zip(results, _shapes(collective, tensors), strict=True):
        result.set_shape(shape)
    return results


@tf.function(autograph=False)  # shared: each cond of its own makes a graph slower
def _require_match(is_matched: Any) -> Any:
    """Return an operation that fails in the graph: Note [Errors]."""

    def fail() -> Any:
        raw = tf.raw_ops
        variable = raw.VarHandleOp(dtype=tf.bool, shape=[], shared_name=_MISMATCH)
        return raw.ReadVariableOp(resource=variable, dtype=tf.bool)

    return tf.cond(is_matched, lambda: tf.constant(value=True), fail)


def _shapes(collective: NamedCollective, tensors: Tensors) -> list[Any]:
    """Return the static shapes of the results."""
    shapes = [tensor.shape for tensor in tensors]
    if not isinstance(collective, _WITH_ROWS):
        return shapes
    shapes = [tf.TensorShape([None]).concatenate(shape[1:]) for shape in shapes]
    return [shapes[0], [None]] if isinstance(collective, Alltoall) else shapes


def _label(collective: NamedCollective) -> str:
    """Return Horovod's name of the operation, such as ``HorovodAllreduce``."""
    return f"Horovod{type(collective).__name__}"


def _graph_name(collective: NamedCollective, tensors: Tensors) -> str:
    """Return an unused node's name, with Horovod's name of an unnamed collective."""
    name = collective.name
    if not name:
        ends = [_UNSAFE.sub("_", tensor.name) for tensor in (tensors[0], tensors[-1])]
        word = "Grouped" if collective.is_group else ""
        shown = "_".join(ends if collective.is_group else ends[:1])
        name = f"Horovod{word}{type(collective).__name__}_{shown}"
    graph = tf.compat.v1.get_default_graph()
    return graph.unique_name(_UNSAFE.sub("_", name), mark_as_used=False)


@tf.autograph.experimental.do_not_convert
def run_in_python(name: str, function: Callable[[], Any], dtype: Any) -> Any:
    """Return a scalar that a function without arguments computes whenever it is run."""
    if tf.executing_eagerly():
        return tf.constant(function(), dtype)
    result = tf.py_function(
        lambda: tf.constant(function(), dtype), [], dtype, name=name
    )
    result.set_shape([])
    return result


def _differentiate(
    collective: NamedCollective, inputs: Tensors, results: Tensors, gradients: Tensors
) -> list[Any]:
    """Return the gradients of the inputs; the rules are those of ``ronde.torch``."""
    name = collective.name and f"{collective.name.rpartition('/')[2]}_gradient"
    process_set, is_group = collective.process_set, collective.is_group
    # In graphs an unused result has no gradient.
    gradients = [
        tf.zeros_like(result) if each is None else tf.convert_to_tensor(each)
        for each, result in zip(gradients, results, strict=True)
    ]
    match collective:
        case Allgather():  # this rank's rows of the averaged gradients
            averaging = Allreduce(process_set, name, is_group, Average)
            own_rows = tf.stack([tf.shape(each)[0] for each in inputs])[tf.newaxis]
            averaged = run(averaging, gradients)
            (rows,) = run(Allgather(process_set, name and f"{name}_rows"), [own_rows])
            rank = state_of(process_set, OpKind.ALLGATHER).rank
            starts = tf.reduce_sum(rows[:rank], axis=0)
            return [
                each[starts[i] : starts[i] + own_rows[0, i]]
                for i, each in enumerate(averaged)
            ]
        case Broadcast(root_rank=root):  # the average at the root, zero elsewhere
            averaged = run(Allreduce(process_set, name, is_group, Average), gradients)
            state = state_of(process_set, OpKind.BROADCAST)
            is_root = state.ranks[state.rank] == root
            # Without the dependency a session would not run the reduction.
            with tf.control_dependencies(averaged):
                zeros = [tf.zeros_like(each) for each in gradients]
            return averaged if is_root else zeros
        case Reducescatter():  # gathered
            factor = collective.prescale * collective.postscale
            if collective.op == Sum:
                factor *= len(state_of(process_set, OpKind.REDUCESCATTER).ranks)
            scaled = [each * tf.cast(factor, each.dtype) for each in gradients]
            return run(Allgather(process_set, name, is_group), scaled)
        case Alltoall():  # each row returns to its sender
            given = [gradients[0], results[1]]
            gradient = run(Alltoall(process_set, name), given)[0]
            num_dropped = tf.shape(inputs[0])[0] - tf.shape(gradient)[0]
            dropped = [[0, 0]] * (len(inputs[0].shape) - 1)
            padded = tf.pad(gradient, [[0, num_dropped], *dropped])
            return [padded, None][: len(inputs)]
        case _:  # the same reduction
            return run(replace(cast("Allreduce", collective), name=name), gradients)
