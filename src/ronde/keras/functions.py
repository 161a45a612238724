"""Horovod's functions on any value and on models, for Keras 2 and Keras 3.

The front end of a Keras's backend is found by name, so that no framework is imported.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from ronde import session
from ronde.errors import CollectiveError, UsageError
from ronde.session import front_end
from ronde.session.gradients import ReductionOptions, compress, variables_of_layers
from ronde.session.operations import Average, Sum, choose_op

LEGACY_CURE = "Install tf-keras and set TF_USE_LEGACY_KERAS=1 to run a Keras 2 script."
GLOBAL_VARIABLES = (
    "hvd.broadcast_global_variables() does not support eager execution. Please use "
    "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
)
_OBJECTS = ("allgather_object", "broadcast_object")


class CallableList(list[Any]):
    """A list that returns itself when called, as ``optimizer.variables()`` did."""

    def __call__(self) -> "CallableList":
        return self


def DistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    **options: Any,
) -> Any:
    """Return a copy of a Keras optimizer that reduces gradients over all ranks.

    Its class has the name of the optimizer's class, and a saved model loads without
    ronde. Gradients are reduced in one call, before clipping and weight decay; if they
    are accumulated, only their sum is. The state of a built optimizer is copied.

    Give a ``name``, equal on all ranks, if several optimizers of one class take steps
    at a time. ``options`` are Horovod's: ``num_groups groups process_set
    scale_local_gradients backward_passes_per_step average_aggregated_gradients``.
    """
    del device_dense, device_sparse
    given = (compression, sparse_as_dense, gradient_predivide_factor, op)
    return distribute(optimizer, name, ReductionOptions(*given, **options).checked())


def distribute(optimizer: Any, name: str | None, options: ReductionOptions) -> Any:
    """Return a distributed optimizer, of the version of Keras of ``optimizer``."""
    if options.op not in (Average, Sum):
        raise UsageError("op currently only supports Average and Sum")
    bases = type(optimizer).__mro__
    is_keras_2 = any(base.__module__.split(".")[0] == "tf_keras" for base in bases)
    version = "tensorflow.keras" if is_keras_2 else "keras"
    module = import_module(f"ronde.{version}.optimizer")
    return module.distribute(optimizer, name, options)


def PartialDistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return ``DistributedOptimizer(...)`` that does not reduce ``local_layers``.

    ``local_layers`` is a layer or a collection of layers.
    """
    local = variables_of_layers(local_layers)
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for variable in local:
        distributed.register_local_var(variable)
    return distributed


class ValueFunctions(NamedTuple):
    """The functions of one Keras, on tensors of ``front_end``."""

    keras: Any
    front_end: Any
    to_tensor: Callable[[Any], Any]

    @property
    def Compression(self) -> Any:  # noqa: N802  Horovod's
        """The formats of the front end."""
        return self.front_end.Compression

    def allreduce(
        self,
        value: Any,
        name: str | None = None,
        average: bool | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        op: int | None = None,
        compression: Any = None,
    ) -> Any:
        """Return the reduction of a value over all ranks, by default the average."""
        wire, finish = compress(compression, self.to_tensor(value))
        reduced = self.front_end.allreduce(
            wire,
            name=name,
            op=choose_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return finish(reduced)

    def allgather(self, value: Any, name: str | None = None) -> Any:
        """Return the values of all ranks, concatenated along dimension 0."""
        return self.front_end.allgather(self.to_tensor(value), name=name)

    def broadcast(self, value: Any, root_rank: int, name: str | None = None) -> Any:
        """Return the value of ``root_rank``."""
        return self.front_end.broadcast(self.to_tensor(value), root_rank, name=name)

    def reducescatter(
        self, value: Any, name: str | None = None, op: int = Average
    ) -> Any:
        """Reduce over all ranks and return this rank's rows of dimension 0."""
        return self.front_end.reducescatter(self.to_tensor(value), name=name, op=op)

    def load_model(
        self,
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: Any = None,
        compression: Any = None,
        legacy_opts: bool = False,
    ) -> Any:
        """Return a saved model with a distributed optimizer, in its saved state."""
        if legacy_opts and hasattr(self.keras, "ops"):
            raise UsageError(f"legacy_opts must be False with Keras 3. {LEGACY_CURE}")
        objects = {each.__name__: each for each in custom_optimizers or ()}
        objects |= custom_objects or {}
        model = self.keras.models.load_model(filepath, custom_objects=objects)
        before = model.optimizer
        if before is not None:
            model.optimizer = DistributedOptimizer(before, compression=compression)
            if not hasattr(self.keras, "ops"):  # copied already with Keras 3
                module = import_module("ronde.tensorflow.keras.optimizer")
                module.copy_state(before, model.optimizer, model.trainable_variables)
        return model

    def broadcast_global_variables(self, root_rank: int) -> None:
        """Raise: only graphs of TensorFlow 1 have global variables."""
        del root_rank
        raise CollectiveError(GLOBAL_VARIABLES)


def exports_of(package: str, module: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package with ``functions`` in its module."""

    def find(name: str) -> object:
        if name in ("callbacks", "elastic"):
            return import_module(f"{package}.{name}")
        if name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
            return globals()[name]
        if name in front_end.__all__:
            return getattr(front_end, name)
        if name in _OBJECTS:
            return getattr(session, name)
        is_own = name in ("init", "shutdown")  # of the backend's front end
        if name.startswith("_") or not (is_own or hasattr(ValueFunctions, name)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        functions = import_module(f"{package}.{module}").functions
        return getattr(functions.front_end if is_own else functions, name)

    return find
