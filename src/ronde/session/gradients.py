"""Reduction of lists of gradients, for TensorFlow and Keras; neither is imported."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import UsageError
from ronde.session.operations import Average, Min
from ronde.session.session import ProcessSet, current_session, global_process_set

Groups = int | list[list[Any]] | None
Tensor = Any
Module = Any


class ReductionOptions(NamedTuple):
    """The arguments of distributed optimizers and tapes that concern gradients."""

    compression: Any = None
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    num_groups: int = 0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    def checked(self) -> "ReductionOptions":
        """Return the options, or raise ``UsageError`` for an invalid one."""
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise UsageError(
                "gradient_predivide_factor not supported with op != Average"
            )
        if self.backward_passes_per_step < 1:
            raise UsageError("backward_passes_per_step must be > 0")
        groups = self.groups
        if self.num_groups:
            groups = self.num_groups if groups is None else groups
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups` and will be "
                "removed in v0.23.0.",
                DeprecationWarning,
                stacklevel=3,
            )
        if not (groups is None or isinstance(groups, list) or groups > 0):
            raise UsageError(
                "groups should be a non-negative integer or a list of list of "
                "tf.Variable."
            )
        return self._replace(groups=groups)

    def is_reduced(self) -> bool:
        """Return True if this rank reduces its gradients with others."""
        # The size of a view may change while a graph lives.
        is_alone = self.process_set.size() == 1 and not current_session().is_of_views
        return self.process_set.included() and not is_alone


class GradientReducer:
    """Reduces gradients in one call, or in one for each of ``groups``.

    Sparse gradients have a call of their own. Gradients that are None stay so, on all
    ranks alike. ``front_end`` is a module; ``to_tensor`` makes a sparse gradient dense.
    """

    def __init__(
        self,
        scope: str,
        options: ReductionOptions,
        front_end: Module,
        to_tensor: Callable[[Any], Any],
    ) -> None:
        self.options = options
        self._scope, self._front_end = f"{scope}_Allreduce/", front_end
        self._to_tensor = to_tensor

    def reduce(
        self,
        grads: Iterable[Any],
        vars: Sequence[Any] | None = None,  # noqa: A002  Horovod's
        use_generic_names: bool = False,
        in_place: bool = False,
    ) -> list[Any]:
        """Return the reduced gradients; lists in ``groups`` need the variables.

        With generic names a call is ``grad_<number>``, without the scope.
        """
        results = [
            self._to_tensor(each)
            if self.options.sparse_as_dense and is_sparse(each)
            else each
            for each in grads
        ]
        if not self.options.is_reduced():
            return results
        tf = sys.modules.get("tensorflow")
        if tf is not None and tf.distribute.has_strategy():
            raise UsageError(
                "gradients must be reduced outside tf.distribute. Start one rank for "
                "each device instead."
            )
        for number, (part, members) in enumerate(self._calls(results, vars)):
            name = f"grad_{number}" if use_generic_names else f"{self._scope}{part}"
            reduced = self._reduced([results[i] for i in members], name, in_place)
            for i, gradient in zip(members, reduced, strict=True):
                results[i] = gradient
        return results

    def least(self, flag: Tensor) -> Tensor:
        """Return the minimum of a scalar tensor over the ranks."""
        if not self.options.is_reduced():
            return flag
        return self._run([flag], f"{self._scope}finite", op=Min)[0]

    def _calls(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> Iterator[tuple[str, list[int]]]:
        """Yield the name of each call and the indices of its gradients."""
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for number, part in enumerate(_parts(given, variables, self.options.groups)):
            for kind in ("grads", "sparse"):
                is_kind = kind == "sparse"
                if members := [i for i in part if is_sparse(gradients[i]) is is_kind]:
                    yield f"{kind}.{number}", members

    def _reduced(self, tensors: list[Any], name: str, in_place: bool) -> list[Any]:
        options = self.options
        if is_sparse(tensors[0]):  # supports no factors but 1
            return self._run(tensors, name, op=options.op)
        factor = options.gradient_predivide_factor
        tensors = [self._to_tensor(tensor) for tensor in tensors]
        pairs = [compress(options.compression, tensor) for tensor in tensors]
        reduced = self._run(
            [wire for wire, _ in pairs],
            name,
            "grouped_allreduce_" if in_place else "grouped_allreduce",
            op=options.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
        )
        return [finish(each) for each, (_, finish) in zip(reduced, pairs, strict=True)]

    @outside_compiler
    def _run(
        self,
        tensors: list[Any],
        name: str,
        function: str = "grouped_allreduce",
        **factors: object,
    ) -> list[Any]:
        run = getattr(self._front_end, function)
        process_set = self.options.process_set
        return list(run(tensors, name=name, process_set=process_set, **factors))


def _parts(
    given: list[int], variables: Sequence[Any] | None, groups: Groups
) -> Iterator[list[int]]:
    """Yield non-empty parts of the indices: ``groups``, and others as the last part."""
    if isinstance(groups, list):
        keys = {variable_key(variables[i]): i for i in given} if variables else {}
        for group in groups:
            found = [keys.pop(variable_key(each), None) for each in group]
            if part := [i for i in found if i is not None]:
                yield part
        given, groups = sorted(keys.values()) if variables else given, 1
    count = min(groups or 1, len(given))
    for number in range(count):
        ends = (number * len(given) // count, (number + 1) * len(given) // count)
        yield given[slice(*ends)]


class LocalVariables:
    """Variables with local gradients: not reduced, only divided by the set's size."""

    def __init__(
        self, options: ReductionOptions, divide: Callable[[Tensor], Tensor]
    ) -> None:
        self._by_key: dict[int, object] = {}
        self._is_scaled, self._divide = options.scale_local_gradients, divide

    def add(self, variable: object) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._by_key[variable_key(variable)] = variable

    def __contains__(self, variable: object) -> bool:
        return bool(self._by_key) and variable_key(variable) in self._by_key

    def reduce_others(
        self,
        reduce: Callable[..., list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
        **options: object,
    ) -> list[Any]:
        """Return all gradients, reduced unless their variable is local."""
        results = list(gradients)
        others = [i for i, variable in enumerate(variables) if variable not in self]
        if self._is_scaled:
            for i in {*range(len(results))}.difference(others):
                results[i] = with_values(results[i], self._divide)
        given = [results[i] for i in others], [variables[i] for i in others]
        for i, gradient in zip(others, reduce(*given, **options), strict=True):
            results[i] = gradient
        return results


def variable_key(variable: object) -> int:
    """Return an id that a ``tf.Variable`` shares with a Keras 3 variable around it."""
    value = getattr(variable, "value", None)
    return id(value) if hasattr(value, "assign") else id(variable)


def variables_of_layers(layers: object) -> list[Any]:
    """Return the trainable variables of a layer or of a collection of layers."""
    every: list[Any] = [] if layers is None else [layers]
    if isinstance(layers, Iterable):
        every = list(cast("Iterable[Any]", layers))
    if not all(hasattr(layer, "trainable_weights") for layer in every):
        raise UsageError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in every for variable in layer.trainable_weights]


def is_sparse(gradient: object) -> bool:
    """Return True for ``tf.IndexedSlices``."""
    return hasattr(gradient, "dense_shape")


def with_values(gradient: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to a gradient: of ``tf.IndexedSlices`` to the values."""
    if not is_sparse(gradient):
        return gradient if gradient is None else function(gradient)
    values = function(gradient.values)
    return type(gradient)(values, gradient.indices, gradient.dense_shape)


def compress(
    compression: Any,  # noqa: ANN401  Horovod's class, a dtype of JAX, or None
    tensor: Tensor,
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the tensor to send, and a function that restores a received one."""
    if compression is None:
        return tensor, lambda received: received
    if not hasattr(compression, "compress"):
        dtype = tensor.dtype
        return tensor.astype(compression), lambda received: received.astype(dtype)
    wire, context = compression.compress(tensor)
    return wire, lambda received: compression.decompress(received, context)
