"""``DistributedOptimizer`` and its options, for Keras 2 and Keras 3."""

import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple, cast

from ronde.errors import UsageError
from ronde.session.operations import Average, Sum
from ronde.session.session import ProcessSet, current_session, global_process_set

LEGACY_CURE = "Install tf-keras and set TF_USE_LEGACY_KERAS=1 to run a Keras 2 script."


class CallableList(list[Any]):
    """A list that returns itself when called, as ``optimizer.variables()`` did."""

    def __call__(self) -> "CallableList":
        return self


class ReductionOptions(NamedTuple):
    """The arguments of ``DistributedOptimizer`` that concern gradients."""

    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: int
    num_groups: int = 0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False

    def checked(self) -> "ReductionOptions":
        """Return the options, or raise ``UsageError`` for an invalid one."""
        if self.op not in (Average, Sum):
            raise UsageError("op currently only supports Average and Sum")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise UsageError(
                "gradient_predivide_factor not supported with op != Average"
            )
        if self.backward_passes_per_step < 1:
            raise UsageError("backward_passes_per_step must be > 0")
        groups = self.groups
        if self.num_groups:
            groups = groups or self.num_groups
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups` and will be "
                "removed in v0.23.0.",
                DeprecationWarning,
                stacklevel=4,
            )
        if not (groups is None or isinstance(groups, list) or groups > 0):
            raise UsageError(
                "groups should be a non-negative integer or a list of list of "
                "tf.Variable."
            )
        return self._replace(groups=groups)

    def is_reduced(self) -> bool:
        """Return True if this rank reduces its gradients with others."""
        is_alone = self.process_set.size() == 1 and not current_session().is_of_views
        return self.process_set.included() and not is_alone


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
    chosen = ReductionOptions(
        compression, sparse_as_dense, gradient_predivide_factor, op, **options
    )
    chosen = chosen.checked()
    bases = type(optimizer).__mro__
    is_keras_2 = any(base.__module__.split(".")[0] == "tf_keras" for base in bases)
    version = "tensorflow.keras" if is_keras_2 else "keras"
    module = import_module(f"ronde.{version}.optimizer")
    return module.distribute(optimizer, name, chosen)


def PartialDistributedOptimizer(  # noqa: N802  Horovod's
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return ``DistributedOptimizer(...)`` that does not reduce ``local_layers``.

    ``local_layers`` is a layer or a collection of layers.
    """
    layers: list[Any] = [] if local_layers is None else [local_layers]
    if isinstance(local_layers, Iterable):
        layers = [*cast("Iterable[Any]", local_layers)]
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise UsageError("All local layers must be of tf.keras.layers.Layer type.")
    distributed = DistributedOptimizer(optimizer, *args, **options)
    for variable in [v for layer in layers for v in layer.trainable_weights]:
        distributed.register_local_var(variable)
    return distributed
