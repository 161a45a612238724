"""Finds drift in models that torch's DistributedDataParallel trains over a group.

Note [What the flags travel with]
    DDP's buckets are torch's own: nothing can be put into them. So a small all-reduce
    of the flags goes with the first all-reduce of every ``PERIOD`` collectives of a
    group that DDP uses, and its sums are read when the next one is due. All ranks make
    a group's collectives in one order, but may step and run backward unequally often.
"""

import weakref
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ronde.collectives import Communicator, Work
from ronde.drift import NUM_FLAGS, PERIOD, Background, DriftCheck, FlagReader, is_apart

_NUM_OPTIMIZERS = 3  # looked at in turn, where several step
_drifts: "weakref.WeakSet[GroupDrift]" = weakref.WeakSet()


class GroupDrift:
    """Looks at the models that are trained over one group."""

    def __init__(self, communicator: Communicator, mode: str) -> None:
        """Begin; ``mode`` as of ``DriftCheck``."""
        self._communicator = communicator
        self._mode, self._check = mode, DriftCheck(mode)
        self._ranks: tuple[int, ...] = ()
        self._models: list[weakref.ref[nn.Module]] = []
        self._device = torch.device("cpu")
        self._named: dict[int, tuple[str, Tensor]] = {}  # by the parameter's id
        self._watched = weakref.WeakKeyDictionary[Optimizer, bool]()
        self._num_calls = self._period = 0
        self._num_steps_to_look = 1
        self._sums: Work[Tensor] | None = None
        self._reader = FlagReader()
        if mode != "off":
            _watch_models()

    def add(self, model: DistributedDataParallel, wrapped: nn.Module) -> None:
        """Look at a model that DDP is about to wrap from now on."""
        group = cast("Any", model).process_group
        self._device = next(wrapped.parameters()).device
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._check = DriftCheck(self._mode)
        self._models.append(weakref.ref(model, self._forget))
        self._forget(None)
        _drifts.add(self)
        _watch_steps()

    def _forget(self, _: object) -> None:
        self._named = {}
        self._watched.clear()

    def _parameters(self) -> dict[int, tuple[str, Tensor]]:
        """Return names and parameters of the models by the parameters' ids."""
        if not self._named:
            alive = [model for ref in self._models if (model := ref()) is not None]
            for number, model in enumerate(alive):
                wrapped = cast("nn.Module", model.module)
                local = getattr(wrapped, "_ddp_params_and_buffers_to_ignore", ())
                of = f" of model {number}" if number else ""
                for name, parameter in wrapped.named_parameters():
                    if name not in local:
                        self._named[id(parameter)] = f"{name}{of}", parameter
        return self._named

    @torch.no_grad()
    def step_done(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        if not self._is_watched(optimizer):
            return
        self._check.num_steps += 1
        self._num_steps_to_look -= 1
        if self._num_steps_to_look == 0:
            self._check.look(optimizer, self._parameters())

    def _is_watched(self, optimizer: Optimizer) -> bool:
        """Return whether it has parameters of the models."""
        is_watched = self._watched.get(optimizer)
        if is_watched is None:
            named = self._parameters()
            groups = [group["params"] for group in optimizer.param_groups]
            is_watched = any(id(p) in named for group in groups for p in group)
            self._watched[optimizer] = is_watched
        return is_watched

    def count_call(self) -> int:
        """Note that a collective of the group begins; return its number."""
        self._num_calls += 1
        return self._num_calls

    @torch.no_grad()
    def start_along(self) -> list[Work[Any]]:
        """Return what is started along with an all-reduce: at times the flags' own."""
        period = self._num_calls // PERIOD
        if not self._models or period == self._period:
            return []
        self._period = period
        if self._sums is not None:
            self._read(self._sums.wait())
        looked = self._check.take_flags()
        flags = torch.zeros(NUM_FLAGS, device=self._device)
        if looked is not None:
            flags.copy_(looked)
        self._num_steps_to_look = 1 + period % _NUM_OPTIMIZERS
        self._sums = self._communicator.all_reduce(flags)
        return [self._sums]

    def _read(self, sums: Tensor) -> None:
        """Report what the flags show; collective if they show a difference."""
        found = self._reader.read(sums, 0)
        if found is not None and is_apart(found[0]):
            known = Background(self._ranks)
            self._check.report(self._communicator, self._parameters().values(), known)


@cache
def _watch_models() -> None:
    """Notice from now on what is wrapped in DistributedDataParallel; once a process."""
    register_module_module_registration_hook(_on_module)


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_on_step)


def _on_module(module: nn.Module, name: str, wrapped: nn.Module | None) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module" and wrapped:
        drift = getattr(cast("Any", module).process_group, "drift", None)
        if isinstance(drift, GroupDrift):
            drift.add(module, wrapped)


def _on_step(optimizer: Optimizer, *_: object) -> None:
    for drift in list(_drifts):
        drift.step_done(optimizer)
