"""Horovod's elastic state of modules and optimizers."""

from collections import OrderedDict
from copy import copy, deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ronde.errors import UsageError
from ronde.session.elastic import ObjectState, source
from ronde.session.session import rank
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.torch.optimizer import DistributedOptimizer


class StateHandler:
    """Saves, restores and synchronises one ``value`` of a ``TorchState``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Copy the value for ``restore``."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the state of rank ``source()`` to all ranks, without saving it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to new ranks; not collective."""

    def set_value(self, value: Any) -> None:
        """Replace the value, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handler of objects with ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        self._saved = _copy_into(self._saved, self.value.state_dict())

    def restore(self) -> None:
        # A copy: optimizers keep the loaded tensors, and change them.
        self.value.load_state_dict(deepcopy(self._saved))

    def sync(self) -> None:
        state = broadcast_object(self.value.state_dict(), root_rank=source())
        self.value.load_state_dict(state)


@torch.no_grad()
def _copy_into(kept: Any, value: Any) -> Any:
    """Return a copy of ``value``, reusing the tensors of ``kept`` that fit."""
    if type(value) in (dict, OrderedDict):
        old = cast("dict[Any, Any]", kept) if isinstance(kept, dict) else {}
        copied = copy(value)
        copied.update((key, _copy_into(old.get(key), value[key])) for key in value)
        return copied
    if type(value) is not Tensor or value.layout is not torch.strided:
        return deepcopy(value)
    is_fitting = (
        type(kept) is Tensor
        and (kept.shape, kept.dtype) == (value.shape, value.dtype)
        and (kept.device, kept.stride()) == (value.device, value.stride())
    )
    return kept.copy_(value) if is_fitting else value.detach().clone()


class ModelStateHandler(StateDictHandler):
    """Handler of modules; ``sync`` broadcasts their tensors in place."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=source())


class OptimizerStateHandler(StateDictHandler):
    """Handler of optimizers; refuses those with ``zero=1``."""

    def __init__(self, value: Any) -> None:
        if DistributedOptimizer.share_of(value) is not None:
            raise UsageError(
                "TorchState does not support an optimizer with zero=1, as each rank "
                "has only its share of the state. Use hvd.elastic.Loop, which makes "
                "copies."
            )
        super().__init__(value)

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=source())


class SamplerStateHandler(StateDictHandler):
    """Handler of samplers; ``reset`` divides the remaining samples."""

    def reset(self) -> None:
        # If ranks were only removed, ``sync`` is not called.
        self.value.reset()


HandlerRegistry = list[tuple[type, type[StateHandler]]]
"""Pairs of a type and the handler of its instances; the first match is used."""

_registry: HandlerRegistry = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (LRScheduler, StateDictHandler),
]


def get_handler_registry() -> HandlerRegistry:
    """Return a copy of the registry, which maps types to their handlers."""
    return list(_registry)


def set_handler_registry(registry: HandlerRegistry) -> None:
    """Replace the registry, which maps types to their handlers."""
    _registry[:] = registry


class TorchState(ObjectState):
    """State with a model, an optimizer and keyword arguments as attributes.

    Arguments may be modules, optimizers, learning-rate schedulers and samplers; other
    values are pickled.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in (kwargs | {"model": model, "optimizer": optimizer}).items():
            kinds = [handler for kind, handler in _registry if isinstance(value, kind)]
            if kinds:
                self._handlers[name] = kinds[0](value)
                super().__setattr__(name, value)
            else:
                plain[name] = value
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        # Last, so that a rank that fails earlier restores all of its old state.
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)
