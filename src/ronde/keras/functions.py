"""Horovod's functions on any value and on models, for Keras 2 and Keras 3."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from ronde import session
from ronde.errors import CollectiveError, UsageError
from ronde.keras import distributed
from ronde.keras.gradients import compress
from ronde.session.operations import Average, choose_op

_SESSION = (
    "Adasum Average Max Min ProcessSet Product Sum add_process_set allgather_object "
    "barrier broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built "
    "global_process_set gloo_built gloo_enabled is_homogeneous is_initialized "
    "join local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
    "nccl_built rank remove_process_set rocm_built size start_timeline "
    "stop_timeline"
)
_GLOBAL = (
    "hvd.broadcast_global_variables() does not support eager execution. Please use "
    "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
)


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
            raise UsageError(
                f"legacy_opts must be False with Keras 3. {distributed.LEGACY_CURE}"
            )
        objects = {each.__name__: each for each in custom_optimizers or ()}
        objects |= custom_objects or {}
        model = self.keras.models.load_model(filepath, custom_objects=objects)
        before = model.optimizer
        if before is not None:
            distribute = distributed.DistributedOptimizer
            model.optimizer = distribute(before, compression=compression)
            if not hasattr(self.keras, "ops"):  # copied already with Keras 3
                module = import_module("ronde.tensorflow.keras.optimizer")
                module.copy_state(before, model.optimizer, model.trainable_variables)
        return model

    def broadcast_global_variables(self, root_rank: int) -> None:
        """Raise: only graphs of TensorFlow 1 have global variables."""
        del root_rank
        raise CollectiveError(_GLOBAL)


def exports_of(package: str, module: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package with ``functions`` in its module."""

    def find(name: str) -> object:
        if name in ("callbacks", "elastic"):
            return import_module(f"{package}.{name}")
        if name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
            return getattr(distributed, name)
        if name in _SESSION.split():
            return getattr(session, name)
        is_own = name in ("init", "shutdown")  # of the backend's front end
        if name.startswith("_") or not (is_own or hasattr(ValueFunctions, name)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        functions = import_module(f"{package}.{module}").functions
        return getattr(functions.front_end if is_own else functions, name)

    return find
