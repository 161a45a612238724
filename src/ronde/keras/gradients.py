"""Reduction of gradients, for Keras 2 and Keras 3."""

from collections.abc import Callable, Sequence
from typing import Any

from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import UsageError
from ronde.keras.distributed import ReductionOptions
from ronde.session.frameworks import import_framework
from ronde.session.operations import Min


class GradientReduction:
    """The reduction of an optimizer's gradients, by names that begin with ``scope``.

    All dense gradients go in one grouped call; ``groups`` does not change that.
    """

    def __init__(
        self,
        scope: str,
        options: ReductionOptions,
        front_end: Any,
        to_tensor: Callable[[Any], Any],
        factor: int = 1,
    ) -> None:
        self._scope, self.options, self._factor = scope, options, factor
        self._front_end, self._to_tensor = front_end, to_tensor

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        is_local: Callable[[Any], bool],
    ) -> list[Any]:
        """Return the reduced gradients; those of local variables are only scaled."""
        options, results = self.options, list(gradients)
        given = [i for i, gradient in enumerate(results) if gradient is not None]
        if not options.is_reduced():
            for i in given:
                results[i] = _scaled(results[i], self._factor)
            return results
        size = options.process_set.size() or 1
        scale = self._factor / (size if options.scale_local_gradients else 1)
        dense: list[int] = []
        for i in given:
            if is_local(variables[i]):
                results[i] = _scaled(results[i], scale)
            elif is_sparse(results[i]) and not options.sparse_as_dense:
                results[i] = self._reduce_sparse(results[i], f"sparse.{i}")
            else:
                dense.append(i)
        tensors = [self._to_tensor(results[i]) for i in dense]
        # The training loop reads torch's gradients from the variables.
        in_place = self._is("torch") and all(
            getattr(variables[i].value, "grad", None) is results[i] for i in dense
        )
        for i, reduced in zip(
            dense, self._reduce_dense(tensors, in_place), strict=True
        ):
            results[i] = reduced
        return results

    def _reduce_dense(self, tensors: list[Any], in_place: bool) -> list[Any]:
        factor = self.options.gradient_predivide_factor
        given: dict[str, Any] = {
            "name": f"{self._scope}_Allreduce/grads",
            "op": self.options.op,
            "prescale_factor": 1.0 / factor,
            "postscale_factor": factor * self._factor,
        }
        pairs = [compress(self.options.compression, tensor) for tensor in tensors]
        wires = [wire for wire, _ in pairs]
        in_place &= all(w is t for w, t in zip(wires, tensors, strict=True))
        reduced = self._run(wires, given, in_place)
        return [finish(t) for t, (_, finish) in zip(reduced, pairs, strict=True)]

    def _reduce_sparse(self, gradient: Any, part: str) -> Any:
        options = self.options
        if options.gradient_predivide_factor != 1.0:
            raise NotImplementedError(
                "Pre/postscale_factor are not supported with tf.IndexedSlices"
            )
        name, group = f"{self._scope}_Allreduce/{part}", options.process_set
        reduced = self._front_end.allreduce(
            gradient, op=options.op, name=name, process_set=group
        )
        return _scaled(reduced, self._factor)

    def least(self, flag: Any) -> Any:
        """Return the minimum of a scalar tensor over the ranks."""
        if not self.options.is_reduced():
            return flag
        given = {"name": f"{self._scope}_Allreduce/finite", "op": Min}
        return self._run([flag], given)[0]

    def _is(self, framework: str) -> bool:
        return self._front_end.__name__.endswith(f".{framework}")

    @outside_compiler
    def _run(
        self, tensors: list[Any], given: dict[str, Any], in_place: bool = False
    ) -> list[Any]:
        if not tensors:
            return []
        is_tensorflow = self._is("tensorflow")
        if is_tensorflow and import_framework("tensorflow").distribute.has_strategy():
            raise UsageError(
                "a distributed optimizer must be used outside tf.distribute. Start one "
                "rank for each device instead."
            )
        name = "grouped_allreduce_" if in_place else "grouped_allreduce"
        run = getattr(self._front_end, name)
        return list(run(tensors, process_set=self.options.process_set, **given))


def compress(compression: Any, tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the tensor to send, and a function that restores a received one."""
    if compression is None:
        return tensor, lambda received: received
    if not hasattr(compression, "compress"):  # a dtype of JAX
        return tensor.astype(compression), lambda received: received.astype(
            tensor.dtype
        )
    wire, context = compression.compress(tensor)
    return wire, lambda received: compression.decompress(received, context)


def is_sparse(gradient: Any) -> bool:
    """Return True for ``tf.IndexedSlices``."""
    return hasattr(gradient, "dense_shape")


def _scaled(gradient: Any, factor: float) -> Any:
    if factor == 1:
        return gradient
    if not is_sparse(gradient):
        return gradient * factor
    values = gradient.values * factor
    return type(gradient)(values, gradient.indices, gradient.dense_shape)
