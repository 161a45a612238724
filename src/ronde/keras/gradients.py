"""Reduction of gradients on the backends of Keras 3."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ronde.collectives.torch_modes import outside_compiler
from ronde.errors import UsageError
from ronde.keras.options import ReductionOptions
from ronde.session.frameworks import import_framework
from ronde.session.operations import Allreduce, Min, NamedCollective

keras = import_framework("keras")


class _Unchanged:
    """Sends tensors as they are."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class _Float16(_Unchanged):
    """Sends floating-point tensors as float16."""

    wire_dtype = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "float" not in dtype:
            return tensor, None
        return keras.ops.cast(tensor, cls.wire_dtype), dtype


class _BFloat16(_Float16):
    """Sends floating-point tensors as bfloat16."""

    wire_dtype = "bfloat16"


Compression = SimpleNamespace(none=_Unchanged, fp16=_Float16, bf16=_BFloat16)
"""Formats for sending gradients: ``none``, ``fp16`` and ``bf16``."""


class GradientReduction:
    """The reduction of an optimizer's gradients under one name.

    All dense gradients go in one grouped call, or one for each of ``groups``.
    """

    def __init__(self, scope: str, options: ReductionOptions) -> None:
        factor = options.gradient_predivide_factor
        passes, is_mean = options.backward_passes_per_step, True
        if passes > 1:  # Keras divides the accumulated sum by their number
            is_mean = options.average_aggregated_gradients
        self._options = options
        self._factor = 1 if is_mean else passes
        self._collective = Allreduce(
            options.process_set,
            f"{scope}_Allreduce",
            is_group=True,
            op=options.op,
            prescale=1.0 / factor,
            postscale=factor * self._factor,
        )

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        optimizer: Any,
        *,
        is_owned: bool = False,
    ) -> list[Any]:
        """Return the reduced gradients; those of local variables are only scaled.

        ``is_owned`` allows writing into the gradients.
        """
        options, results = self._options, list(gradients)
        given = [i for i, gradient in enumerate(results) if gradient is not None]
        if not options.is_reduced():
            for i in given:
                results[i] = _scaled(results[i], self._factor)
            return results
        keys = [optimizer._var_key(variable) for variable in variables]  # noqa: SLF001
        local: Collection[Any] = optimizer.local_keys
        size = options.process_set.size() or 1
        scale = self._factor / (size if options.scale_local_gradients else 1)
        dense: list[int] = []
        for i in given:
            if keys[i] in local:
                results[i] = _scaled(results[i], scale)
            elif is_sparse(results[i]) and not options.sparse_as_dense:
                results[i] = self._reduce_sparse(results[i], f"sparse.{i}")
            else:
                results[i] = _dense(results[i])
                dense.append(i)
        # Gradients that no one else holds, or that training reads from the variables.
        is_owned = is_owned or all(
            getattr(variables[i].value, "grad", None) is results[i] for i in dense
        )
        parts = options.split([keys[i] for i in dense], optimizer._var_key)  # noqa: SLF001
        for number, part in enumerate(parts):
            members = [dense[place] for place in part]
            tensors = [results[i] for i in members]
            reduced = self._reduce_dense(tensors, f"grads.{number}", is_owned=is_owned)
            for i, gradient in zip(members, reduced, strict=True):
                results[i] = gradient
        return results

    def all_agree(self, condition: Any) -> Any:
        """Return a scalar tensor: True if the condition holds on all ranks."""
        if not self._options.is_reduced():
            return condition
        collective = replace(
            self._collective,
            name=self._name("finite"),
            op=Min,
            prescale=1.0,
            postscale=1.0,
        )
        flag = keras.ops.cast(condition, "float32")
        return run_group(collective, [flag])[0] > 0.5

    def _name(self, part: str) -> str:
        return f"{self._collective.name}/{part}"

    def _reduce_dense(
        self, tensors: list[Any], part: str, *, is_owned: bool
    ) -> list[Any]:
        collective = replace(self._collective, name=self._name(part))
        compressor = self._options.compression
        if compressor is Compression.none:
            return run_group(collective, tensors, in_place=is_owned)
        pairs = [compressor.compress(tensor) for tensor in tensors]
        sent = run_group(collective, [wire for wire, _ in pairs])
        return [
            compressor.decompress(wire, context)
            for wire, (_, context) in zip(sent, pairs, strict=True)
        ]

    def _reduce_sparse(self, gradient: Any, part: str) -> Any:
        options = self._options
        if options.gradient_predivide_factor != 1.0:
            raise NotImplementedError(
                "Pre/postscale_factor are not supported with tf.IndexedSlices"
            )
        reduced = import_module("ronde.tensorflow").allreduce(
            gradient,
            op=options.op,
            name=self._name(part),
            process_set=options.process_set,
        )
        return _scaled(reduced, self._factor)


def is_sparse(gradient: Any) -> bool:
    """Return True for TensorFlow's ``IndexedSlices``."""
    return hasattr(gradient, "dense_shape")


def _dense(gradient: Any) -> Any:
    return keras.ops.convert_to_tensor(gradient) if is_sparse(gradient) else gradient


def _scaled(gradient: Any, factor: float) -> Any:
    if factor == 1:
        return gradient
    if not is_sparse(gradient):
        return gradient * factor
    values = gradient.values * factor
    return type(gradient)(values, gradient.indices, gradient.dense_shape)


@outside_compiler
def run_group(
    collective: NamedCollective, tensors: list[Any], *, in_place: bool = False
) -> list[Any]:
    """Run a grouped all-reduce on tensors of the current backend.

    ``in_place`` allows writing into the tensors where the backend can.
    """
    backend = keras.backend.backend()
    if not tensors:
        return []
    if backend == "torch":
        results = collective.run(tensors, in_place=in_place)
        return tensors if in_place else list(results)
    options: dict[str, Any] = {
        "name": collective.name,
        "op": collective.op,
        "prescale_factor": collective.prescale,
        "postscale_factor": collective.postscale,
        "process_set": collective.process_set,
    }
    if backend == "jax":
        return list(import_module("ronde.jax").grouped_allreduce(tensors, **options))
    if backend == "tensorflow":
        refuse_strategy()
        operations = import_module("ronde.tensorflow.mpi_ops")
        return list(operations._grouped_allreduce(tensors, **options))  # noqa: SLF001
    raise UsageError(
        f"the backend of Keras must be tensorflow, jax or torch, got {backend}. Set "
        "KERAS_BACKEND."
    )


def refuse_strategy() -> None:
    """Refuse to reduce inside a strategy of ``tf.distribute``."""
    tf = import_framework("tensorflow")
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise UsageError(
            f"a distributed optimizer must be outside tf.distribute, got {name}. Start "
            "one rank for each device instead."
        )
