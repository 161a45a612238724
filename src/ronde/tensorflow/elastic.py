"""Elastic training with TensorFlow: states of variables, and ``run``."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from ronde.session.elastic import ObjectState, State
from ronde.session.elastic_arrays import Arrays, ArrayState, KerasState, run_compiled
from ronde.session.frameworks import import_framework

tf = import_framework("tensorflow")

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorate a training function to continue after failures and changes of hosts.

    As ``ronde.torch.elastic.run``, also if a collective fails in a ``tf.function``.
    Such functions are not traced again for new ranks: in them call ``hvd.size_op()``,
    not ``hvd.size()``.
    """
    return run_compiled(func, tf.errors.UnknownError)


class TensorFlowState(ArrayState):
    """State of variables, and keyword arguments as attributes.

    Args:
        variables: Without them, all global variables of a TensorFlow 1 graph.
        session: The session of a TensorFlow 1 graph.
    """

    def __init__(
        self,
        variables: Iterable[Any] | None = None,
        session: Any = None,
        **kwargs: Any,
    ) -> None:
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables: list[Any] = list(variables or ())
        self.session = session
        super().__init__(**kwargs)

    def read_arrays(self) -> Arrays:
        """Return copies of the variables' values."""
        if self.session is None:
            return [np.array(variable.numpy()) for variable in self.variables]
        return list(map(np.array, self.session.run(self.variables)))

    def write_arrays(self, arrays: Arrays) -> None:
        """Assign the arrays to the variables."""
        for variable, array in zip(self.variables, arrays, strict=True):
            if self.session is None:
                variable.assign(array.copy())  # as the variable may keep its memory
            else:
                variable.load(array, self.session)


class TensorFlowKerasState(KerasState):
    """State of a built model of Keras 2 or 3, its optimizer, and keyword arguments.

    ``backend`` is Horovod's argument for TensorFlow 1, and is ignored.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)
