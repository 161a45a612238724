"""Horovod's callbacks, made for a given Keras, of version 2 or 3."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ronde.errors import UsageError
from ronde.session.operations import (
    Allreduce,
    Average,
    Broadcast,
    allgather_object,
)
from ronde.session.session import global_process_set, rank, size

Logs = dict[str, Any] | None


def broadcast_values(variables: list[Any], root_rank: int, name: str) -> None:
    """Copy the values of the root's variables to all ranks; collective."""
    arrays = [np.array(variable.numpy()) for variable in variables]
    # As bytes: any dtype, also those that torch lacks.
    data = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in arrays]
    if data:
        collective = Broadcast(global_process_set, name, True, root_rank=root_rank)
        collective.run(data, in_place=True)
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


class _CallbackMethods:
    model: Any  # Keras sets these two
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        # TensorFlow compiles the training step later. XLA refuses our collectives.
        if not hasattr(model, "jax_state_sync"):
            model.jit_compile = False
        super().set_model(model)  # pyright: ignore[reportAttributeAccessIssue]

    def sync(self) -> None:
        """Copy the state of a compiled JAX loop to the variables, before a change."""
        getattr(self.model, "jax_state_sync", bool)()
