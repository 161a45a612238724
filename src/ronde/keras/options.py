"""Options of distributed Keras optimizers, checked alike for Keras 2 and Keras 3."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from ronde.errors import UsageError
from ronde.session.operations import Average, Sum
from ronde.session.session import ProcessSet, current_session

LEGACY_CURE = "Install tf-keras and set TF_USE_LEGACY_KERAS=1 to run a Keras 2 script."


@dataclass(frozen=True, slots=True)
class ReductionOptions:
    """The arguments of ``DistributedOptimizer`` that concern gradients."""

    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: int
    groups: Any  # an integer, lists of variables, or None
    process_set: ProcessSet
    scale_local_gradients: bool
    backward_passes_per_step: int
    average_aggregated_gradients: bool

    def checked(self, num_groups: int = 0) -> "ReductionOptions":
        """Return the options with ``num_groups``, the old name of ``groups``."""
        if self.op not in (Average, Sum):
            raise UsageError("op currently only supports Average and Sum")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise UsageError(
                "gradient_predivide_factor not supported with op != Average"
            )
        if self.backward_passes_per_step < 1:
            raise UsageError("backward_passes_per_step must be > 0")
        groups = self.groups
        if num_groups:
            warnings.warn(
                "Parameter `num_groups` has been replaced by `groups` and will be "
                "removed in v0.23.0.",
                DeprecationWarning,
                stacklevel=4,
            )
            groups = num_groups if groups is None else groups
        if groups is not None and not (isinstance(groups, list) or groups > 0):
            raise UsageError(
                "groups should be a non-negative integer or a list of list of "
                "tf.Variable."
            )
        return replace(self, groups=groups)

    def is_reduced(self) -> bool:
        """Return True if this rank reduces its gradients with others."""
        process_set = self.process_set
        is_alone = process_set.size() == 1 and not current_session().is_of_views
        return process_set.included() and not is_alone

    def split(
        self, keys: list[Any], key_of: Callable[[Any], Any]
    ) -> Iterable[list[int]]:
        """Yield indices of ``keys``, which identify variables, by group."""
        groups = self.groups
        group_of: dict[Any, int]
        if isinstance(groups, list):
            groups = cast("list[list[Any]]", groups)
            group_of = {
                key_of(variable): number
                for number, members in enumerate(groups)
                for variable in members
            }
        else:
            count = min(groups or 1, len(keys))
            group_of = {key: i * count // len(keys) for i, key in enumerate(keys)}
        by_group: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            by_group.setdefault(group_of.get(key, -1), []).append(index)
        return by_group.values()


def is_keras_2(instance: Any) -> bool:
    """Return True for an object of tf-keras, such as an optimizer."""
    bases = type(instance).__mro__
    return any(base.__module__.split(".")[0] == "tf_keras" for base in bases)
