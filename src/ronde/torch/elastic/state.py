"""The state of a PyTorch training: models, optimizers, samplers and plain values."""

from copy import deepcopy
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ronde.torch.elastic.objects import ObjectState
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.torch.session import rank


class StateHandler:
    """Saves, restores and synchronises one value of a ``TorchState``.

    Attributes:
        value: The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Take a copy for ``restore``."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the last ``save``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to new ranks; not collective."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on, and save it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handles what has ``state_dict()`` and ``load_state_dict()``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copy the state."""
        self._saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        # A copy again: optimizers keep what they load, and go on to change it.
        self.value.load_state_dict(deepcopy(self._saved))

    def sync(self) -> None:
        """Load and save rank 0's state."""
        self._saved = broadcast_object(self.value.state_dict(), root_rank=0)
        self.restore()


class ModelStateHandler(StateDictHandler):
    """Handles a module."""

    def sync(self) -> None:
        """Copy rank 0's parameters and buffers in place, and save them."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Handles an optimizer."""

    def sync(self) -> None:
        """Copy rank 0's state, and save it."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateDictHandler):
    """Handles an ``ElasticSampler``."""

    def reset(self) -> None:
        """Divide the rest of the epoch among the new ranks.

        Without it, when ranks were only removed and so nothing is synchronised, those
        left would go on with their old shares, and nobody would see the others.
        """
        self.value.reset()


HandlerRegistry = list[tuple[type, type[StateHandler]]]
"""Types, and what handles their instances; the first that fits counts."""

_registry: HandlerRegistry = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (LRScheduler, StateDictHandler),
]


def get_handler_registry() -> HandlerRegistry:
    """Return what handles which type."""
    return list(_registry)


def set_handler_registry(registry: HandlerRegistry) -> None:
    """Say what is to handle which type, in states that are made from now on.

    Args:
        registry: All that counts from now on.
    """
    _registry[:] = registry


class TorchState(ObjectState):
    """The state of a training: models, optimizers, and what else it needs to go on."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Make ``model``, ``optimizer`` and each keyword an attribute.

        Args:
            model: A module, or None.
            optimizer: An optimizer, or None.
            kwargs: Further modules, optimizers, learning-rate schedulers and samplers;
                anything else is pickled.
        """
        named = kwargs | {"model": model, "optimizer": optimizer}
        found = {name: _handler(value) for name, value in named.items()}
        self._handlers = {n: handler for n, handler in found.items() if handler}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        super().__init__(
            bcast_object=broadcast_object,
            get_rank=rank,
            **{n: value for n, value in named.items() if n not in self._handlers},
        )

    def save(self) -> None:
        """Copy everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last ``save`` with everything."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take over all that rank 0 has, and save it; collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Divide what samplers have left among the new ranks."""
        for handler in self._handlers.values():
            handler.reset()
        super().reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None
