"""Horovod's callbacks, made for a given Keras, of version 2 or 3."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from ronde.errors import UsageError
from ronde.session.operations import Allreduce, Average, Broadcast, allgather_object
from ronde.session.session import global_process_set, rank, size

Logs = dict[str, Any] | None


_Keras: Any = object  # the mixins are put before a class of Keras


class _CallbackMethods(_Keras):
    is_tensorflow: bool
    is_keras_3: bool
    model: Any  # Keras sets these two
    params: dict[str, Any]

    def set_model(self, model: Any) -> None:
        # Keras calls this before it compiles the step. XLA refuses our collectives.
        if self.is_tensorflow:
            model.jit_compile = False
        super().set_model(model)

    def sync(self) -> None:
        """Copy the state of a loop on JAX to the variables, which then are used."""
        getattr(self.model, "jax_state_sync", bool)()


class _BroadcastMethods(_CallbackMethods):
    """Copies the model and the optimizer of ``root_rank`` to all ranks, once.

    With Keras 3 this is before the first batch, with Keras 2 after it. Random seeds and
    ``local_variables`` are not copied.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ) -> None:
        del device
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False
        self._local: list[Any] = []
        single = hasattr(local_variables, "assign")
        for variable in [local_variables] if single else local_variables or ():
            if not hasattr(variable, "assign"):
                raise UsageError("All local variables must be of tf.Variable type.")
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.append(var)

    def on_train_begin(self, logs: Logs = None) -> None:
        del logs
        optimizer = self.model.optimizer
        if self.is_keras_3:
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del batch, logs
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        self.sync()
        local = {id(variable) for variable in self._local}
        chosen = [
            variable
            for variable in self.model.weights
            if not {id(variable), id(getattr(variable, "value", None))} & local
        ]
        broadcast_values(chosen, self.root_rank, "broadcast.model")
        if self.model.optimizer is not None:
            variables = self.model.optimizer.variables
            variables = variables() if callable(variables) else variables
            broadcast_values(variables, self.root_rank, "broadcast.optimizer")
        self.broadcast_done = True


def broadcast_values(variables: Iterable[Any], root_rank: int, name: str) -> None:
    """Copy the values of the root's variables to all ranks; collective."""
    pairs = [(variable, np.array(variable.numpy())) for variable in variables]
    # As bytes: any dtype, also those that torch lacks.
    data = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for _, array in pairs]
    if data:
        collective = Broadcast(
            global_process_set, name, is_group=True, root_rank=root_rank
        )
        collective.run(data, in_place=True)
    for variable, array in pairs:
        variable.assign(array)


class _MetricAverageMethods(_CallbackMethods):
    """Averages the numbers in ``logs`` over all ranks at the end of each epoch.

    Put it before callbacks that read the logs. A number that not all ranks log stays.
    """

    def __init__(self, device: str = "") -> None:
        del device
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch
        logs = {} if logs is None else logs
        arrays = {name: np.asarray(value) for name, value in logs.items()}
        own = {(n, a.shape) for n, a in arrays.items() if a.dtype.kind in "biuf"}
        every: list[Any] = allgather_object(own, "MetricAverageCallback.names")
        names = [name for name, _ in sorted(set[Any].intersection(*every))]
        if names:
            values = [torch.from_numpy(arrays[n].astype(np.float64)) for n in names]
            name = "MetricAverageCallback"
            average = Allreduce(global_process_set, name, is_group=True, op=Average)
            for key, value in zip(names, average.run(values), strict=True):
                logs[key] = value.numpy() if value.ndim else value.item()


class _ScheduleMethods(_CallbackMethods):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    A constant multiplier m means ``m ** (epoch - start_epoch)``. With ``staircase`` the
    rate changes with the epoch, else with every batch, and the epoch has a fraction.
    ``momentum_correction`` scales the momentum of one step by new rate / old rate.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if cast("Any", initial_lr) is None:
            raise UsageError("Parameter `initial_lr` is required")
        self.initial_lr, self.staircase = initial_lr, staircase
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.restore_momentum: float | None = None
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        del logs
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise UsageError(
                    "Could not autodetect the number of steps per epoch. Please "
                    f"specify the steps_per_epoch parameter to the "
                    f"{type(self).__name__}() or upgrade to the latest version of "
                    "Keras."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        del logs
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        del logs
        epoch = self.current_epoch
        is_over = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or is_over or (self.staircase and batch):
            return
        steps = self.steps_per_epoch or 1
        self._adjust(epoch if self.staircase else epoch + batch / steps)

    def _adjust(self, epoch: float) -> None:
        self.sync()
        old, new = self.rate(), self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        momentum = getattr(optimizer, "momentum", None)
        if not (self.momentum_correction and old and new != old):
            return
        if hasattr(momentum, "assign"):  # a variable, in old optimizers
            self.restore_momentum = float(np.array(momentum))
            optimizer.momentum = self.restore_momentum * new / old
        elif momentum:
            # A number that is a constant of the compiled step. The slots are not.
            for name in ("momentums", "_momentums"):
                for slot in getattr(optimizer, name, ()):
                    slot.assign(slot * (new / old))

    def rate(self) -> float:
        return float(np.array(self.model.optimizer.learning_rate))

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del batch, logs
        if self.restore_momentum is not None:
            self.model.optimizer.momentum = self.restore_momentum
            self.restore_momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch
        if logs is not None:
            self.sync()
            logs["lr"] = self.rate()


class _WarmupMethods(_ScheduleMethods):
    """Raises the learning rate from ``initial_lr / size()`` to ``initial_lr``."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One step more, so that an epoch ends at a round number.
            done = epoch + 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (done * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and rank() == 0:
            text = "\nEpoch %d: finished gradual learning rate warmup to %g."
            print(text % (epoch + 1, self.rate()))  # noqa: T201  as Horovod does


class _BestModelMethods(_CallbackMethods):
    """Saves the best model only; set ``filepath`` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(
            "best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None


@cache
def callback_classes(keras: Any) -> dict[str, Any]:
    """Return Horovod's callback classes, by name, as subclasses of a Keras's own."""
    own = keras.callbacks.Callback
    facts: dict[str, Any] = {
        "is_tensorflow": keras.backend.backend() == "tensorflow",
        "is_keras_3": hasattr(keras, "ops"),
        "__module__": "ronde.keras.callbacks",
    }
    bases = {
        "BroadcastGlobalVariablesCallback": (_BroadcastMethods, own),
        "MetricAverageCallback": (_MetricAverageMethods, own),
        "LearningRateScheduleCallback": (_ScheduleMethods, own),
        "LearningRateWarmupCallback": (_WarmupMethods, own),
        "BestModelCheckpoint": (_BestModelMethods, keras.callbacks.ModelCheckpoint),
    }
    return {
        name: type(name, pair, {**facts, "__doc__": pair[0].__doc__})
        for name, pair in bases.items()
    }
