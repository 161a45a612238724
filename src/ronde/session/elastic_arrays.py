"""Elastic states of arrays and of Keras models; no framework is imported here."""

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ronde.errors import CollectiveError, UsageError
from ronde.session.elastic import ObjectState, run, source
from ronde.session.operations import Broadcast, broadcast_object
from ronde.session.session import global_process_set, rank

R = TypeVar("R")
Arrays = Sequence[NDArray[Any]]
_OPERATIONS = "Allreduce|Allgather|Broadcast|Alltoall|Reducescatter"
_NAMES = (
    f"(Horovod(Grouped)?({_OPERATIONS})|HorovodInternalError|CollectiveError"
    "|MembershipError|PeerLostError)"
)
_FAILURES = (f"{_NAMES}: .*", f"{_NAMES}.*")  # the text itself, or only a node's name
_TRACED = ("train_function", "test_function", "predict_function")


class ArrayState(ObjectState):
    """State with arrays, saved as copies on the host, and picklable attributes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._saved_arrays = self.read_arrays()

    @abstractmethod
    def read_arrays(self) -> Arrays:
        """Return contiguous copies of all arrays."""

    @abstractmethod
    def write_arrays(self, arrays: Arrays) -> None:
        """Set all arrays to the values of ``arrays``, without keeping these."""

    def save(self) -> None:
        self._saved_arrays = self.read_arrays()
        super().save()

    def restore(self) -> None:
        self.write_arrays(self._saved_arrays)
        super().restore()

    def sync(self) -> None:
        root, arrays = source(), self.read_arrays()
        forms = broadcast_object([(a.shape, a.dtype) for a in arrays], root)
        if len(forms) != len(arrays):
            raise UsageError(
                f"the state must have as many arrays as that of rank {root}, "
                f"{len(forms)}, got {len(arrays)}. Build the same model on every rank."
            )
        if rank() != root:
            arrays = [np.empty(shape, dtype) for shape, dtype in forms]
        named = {f"elastic.array.{n}": array for n, array in enumerate(arrays)}
        # As bytes, as torch does not have all dtypes of the frameworks.
        works = [
            Broadcast(global_process_set, name, root_rank=root).start(
                (torch.from_numpy(array.reshape(-1).view(np.uint8)),), in_place=True
            )
            for name, array in named.items()
        ]
        for work in works:
            work.wait()
        self.write_arrays(arrays)
        super().sync()
        # Last, so that a rank that fails earlier restores all of its old state.
        self._saved_arrays = arrays


class KerasState(ArrayState):
    """State of a built Keras model, its optimizer, and keyword arguments.

    Args:
        optimizer: Without one, the optimizer that the model was compiled with.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            text = "Model must be built first. Run `model.build(input_shape)`."
            raise UsageError(text)
        self.model = model
        self.optimizer: Any = optimizer or getattr(model, "optimizer", None)
        super().__init__(**kwargs)

    def read_arrays(self) -> Arrays:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # as ``fit`` holds the newest values
        return [np.array(variable.numpy()) for variable in self._variables()]

    def write_arrays(self, arrays: Arrays) -> None:
        for variable, array in zip(self._variables(), arrays, strict=True):
            variable.assign(array.copy())

    def reset(self) -> None:
        # They may hold the old number of ranks as a constant.
        for name in _TRACED:
            setattr(self.model, name, None)

    def _variables(self) -> list[Any]:
        optimizer, weights = self.optimizer, list(self.model.weights)
        if optimizer is None:
            return weights
        # The optimizer of a new rank has no slots yet.
        if not getattr(optimizer, "built", False):
            build = getattr(optimizer, "build", None) or optimizer._create_all_weights  # noqa: SLF001
            build(self.model.trainable_variables)
        is_method = callable(optimizer.variables)  # of legacy optimizers
        slots: Any = optimizer.variables() if is_method else optimizer.variables
        return [*weights, *slots]


def run_compiled(
    function: Callable[..., R], *kinds: type[Exception]
) -> Callable[..., R]:
    """Decorate a training function like ``run``; it may call compiled code.

    There a framework raises its own ``kinds`` of errors for a failed collective; their
    messages contain the first error's class and text.
    """

    @functools.wraps(function)
    def train(*args: Any, **kwargs: Any) -> R:
        try:
            return function(*args, **kwargs)
        except CollectiveError:
            raise
        except kinds as error:
            cause: BaseException | None = error
            while cause is not None:
                for pattern in _FAILURES:
                    if found := re.search(pattern, str(cause)):
                        raise CollectiveError(found[0]) from error
                cause = cause.__cause__ or cause.__context__
            raise

    return run(train)


class StateCallback:
    """Base of the elastic callbacks, beside the ``Callback`` of a Keras."""

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitState(StateCallback):
    """Commits the state after every ``batches_per_commit`` batches."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self.num_batches = 0

    def on_train_begin(self, logs: object = None) -> None:
        del logs
        self.num_batches = 0  # new ranks begin to count here

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        del batch, logs
        self.num_batches += 1
        if self.num_batches % self.batches_per_commit == 0:
            self.state.commit()


class UpdateBatchState(StateCallback):
    """Sets ``state.batch`` to the number of batches done in this epoch."""

    def on_train_begin(self, logs: object = None) -> None:
        del logs
        self.steps = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        del epoch, logs
        if self.steps:
            self.params["steps"] = max(self.steps - self.state.batch, 0)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        del logs
        self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del epoch, logs
        self.state.batch = 0


class UpdateEpochState(StateCallback):
    """Adds 1 to ``state.epoch`` after each epoch."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del epoch, logs
        self.state.epoch += 1


def elastic_callbacks(base: type[Any]) -> dict[str, type[Any]]:
    """Return Horovod's elastic callbacks, by name, for a Keras with this base."""
    return {
        name: type(name, (kind, base), {"__doc__": kind.__doc__})
        for kind in (CommitState, UpdateBatchState, UpdateEpochState)
        for name in [f"{kind.__name__}Callback"]
    }
