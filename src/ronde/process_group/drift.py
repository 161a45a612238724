"""Finds drift in models that torch's DistributedDataParallel trains over a group.

Note [By the store, not by collectives]
    A collective of ours among the program's would hang where the program's calls are
    not the same on all ranks for a while, which groups survive. So each rank writes its
    checksums to the store of the group, and a look later rank 0 reads those of all; in
    the mode error all ranks read. Two looks are compared if the ranks had made equally
    many collectives at both. What is missing is not waited for.
"""

import json
import weakref
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ronde.drift import Background, Values, judge, report, sums_of_parts
from ronde.process_group.attendance import SideStore

_PERIOD = 64  # collectives between looks; more with more ranks, as rank 0 reads them
_NUM_PARAMETERS = 32  # looked at each time
_drifts: "list[weakref.ref[GroupDrift]]" = []


class _Look(NamedTuple):
    """What an optimizer's parameters were after a step."""

    num_calls: int  # collectives before it
    number: int  # among looks after as many
    weights: dict[str, str]
    state: dict[str, Any]
    options: dict[str, Any]


class GroupDrift:
    """Looks at the models that are trained over one group."""

    def __init__(self, store: SideStore, rank: int, size: int, mode: str) -> None:
        """Begin; ``mode`` is off, warn or error."""
        self._store, self._rank, self._size, self._mode = store, rank, size, mode
        self._is_over = True  # until there is a model
        self._period = max(_PERIOD, size)
        self._num_calls = self._num_steps = self._num_models = self._phase = 0
        self._ranks: tuple[int, ...] = ()
        self._models: dict[int, weakref.ref[DistributedDataParallel]] = {}
        self._named: dict[int, tuple[str, Tensor]] = {}  # by the parameter's id
        self._phases: dict[int, int] = {}  # of the last look, by the optimizer's id
        self._looks: list[_Look] = []  # of this phase
        self._last_looks: list[_Look] = []
        if mode != "off":
            _watch_models()

    def add(self, model: DistributedDataParallel) -> None:
        """Look at a model from now on."""
        if model in [ref() for ref in self._models.values()]:
            return
        self._ranks = tuple(
            dist.get_process_group_ranks(cast("Any", model).process_group)
        )
        self._is_over, self._looks, self._last_looks = False, [], []
        self._models[self._num_models] = weakref.ref(model, self._forget)
        self._num_models += 1
        self._forget(None)
        if all(ref() is not self for ref in _drifts):
            _drifts.append(weakref.ref(self, _drifts.remove))
        _watch_steps()

    def _forget(self, _: object) -> None:
        self._named = {}

    def count_call(self) -> int:
        """Note that a collective of the group has begun; return its number."""
        self._num_calls += 1
        return self._num_calls

    @torch.no_grad()
    def step_done(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped; look at its parameters now and then."""
        self._num_steps += 1
        phase = self._num_calls // self._period
        if self._phases.get(id(optimizer), 0) == phase or self._is_over:
            return
        self._phases[id(optimizer)] = phase
        named = self._parameters()
        groups = [group["params"] for group in optimizer.param_groups]
        own = [named[id(p)] for group in groups for p in group if id(p) in named]
        if own:
            self._look(optimizer, own, phase)

    def _parameters(self) -> dict[int, tuple[str, Tensor]]:
        """Return names and parameters of the models by the parameters' ids."""
        if not self._named:
            for number, ref in self._models.items():
                model = ref()
                if model is None:
                    continue
                wrapped = cast("nn.Module", model.module)
                local = getattr(wrapped, "_ddp_params_and_buffers_to_ignore", ())
                of = f" of model {number}" if number else ""
                for name, parameter in wrapped.named_parameters():
                    if name not in local:
                        self._named[id(parameter)] = f"{name}{of}", parameter
        return self._named

    def _look(
        self, optimizer: Optimizer, own: list[tuple[str, Tensor]], phase: int
    ) -> None:
        if phase != self._phase:
            self._last_looks, self._looks, self._phase = self._looks, [], phase
        first = phase * _NUM_PARAMETERS
        chosen = [own[i % len(own)] for i in range(first, first + _NUM_PARAMETERS)]
        number = sum(look.num_calls == self._num_calls for look in self._looks)
        weights, state = sums_of_parts(dict(chosen), optimizer, first // len(own))
        options = Values.of([], optimizer).options
        self._looks.append(_Look(self._num_calls, number, weights, state, options))
        try:
            found = self._exchange(phase)
        except RuntimeError:  # the store's
            self._is_over = True
            return
        for everyone in found:
            drift = judge(everyone, Background())
            if drift.num_weights:
                self._is_over = True
                is_first = self._rank == 0
                report(drift, self._mode, self._num_steps, is_first=is_first)
                return

    def _exchange(self, phase: int) -> list[dict[int, Values]]:
        """Write this phase's looks; return by rank what was seen in the one before."""
        store = self._store.connection
        store.set(f"drift/{self._rank}/{phase % 2}", json.dumps(self._looks))
        last = [f"drift/{rank}/{(phase - 1) % 2}" for rank in range(self._size)]
        is_reader = self._rank == 0 or self._mode == "error"
        if not (is_reader and self._last_looks and store.check(last)):
            return []
        of_ranks = list(map(_read_looks, cast("Any", store).multi_get(last)))
        return [
            {
                rank: looks[place]
                for rank, looks in zip(self._ranks, of_ranks, strict=True)
                if place in looks
            }
            for place in [look[:2] for look in self._last_looks]
        ]


def _read_looks(text: bytes) -> dict[tuple[int, int], Values]:
    looks = [_Look(*look) for look in json.loads(text)]
    return {look[:2]: Values(*look[2:], {}) for look in looks}


@cache
def _watch_models() -> None:
    """Notice from now on what is wrapped in DistributedDataParallel; once a process."""
    register_module_module_registration_hook(_on_module)


@cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_on_step)


def _on_module(module: nn.Module, name: str, _: object) -> None:
    if isinstance(module, DistributedDataParallel) and name == "module":
        drift = getattr(cast("Any", module).process_group, "drift", None)
        if isinstance(drift, GroupDrift):
            drift.add(module)


def _on_step(optimizer: Optimizer, *_: object) -> None:
    for ref in _drifts:
        drift = ref()
        if drift is not None:
            drift.step_done(optimizer)
