"""Detection of weights that differ between ranks of DistributedDataParallel.

Note [Drift checks over the store]
    An extra collective could hang, as ranks may legally make different calls for a
    while. So each rank writes checksums to the group's store, and at the next check
    rank 0 reads the checksums of all ranks (with mode error, all ranks read). Snapshots
    are compared if they were taken after equally many collectives. No rank waits for
    missing snapshots.
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

_PERIOD = 64  # collectives between checks; at least the number of ranks
_NUM_PARAMETERS = 32  # in one check
_drifts: "list[weakref.ref[GroupDrift]]" = []


class _Snapshot(NamedTuple):
    """Checksums of an optimizer's parameters after a step."""

    num_calls: int  # collectives before the snapshot
    number: int  # index among snapshots with the same ``num_calls``
    weights: dict[str, str]
    state: dict[str, Any]
    options: dict[str, Any]


class GroupDrift:
    """The drift checks of all models that are trained over one group."""

    def __init__(self, store: SideStore, rank: int, size: int, mode: str) -> None:
        """Create the checks; ``mode`` is off, warn or error."""
        self._store, self._rank, self._size, self._mode = store, rank, size, mode
        self._is_over = True  # until there is a model
        self._period = max(_PERIOD, size)
        self._num_calls = self._num_steps = self._num_models = self._phase = 0
        self._ranks: tuple[int, ...] = ()
        self._models: dict[int, weakref.ref[DistributedDataParallel]] = {}
        self._named: dict[int, tuple[str, Tensor]] = {}  # by the parameter's id
        self._phases: dict[int, int] = {}  # of the last check, by the optimizer's id
        self._snapshots: list[_Snapshot] = []  # of this phase
        self._last_snapshots: list[_Snapshot] = []
        if mode != "off":
            _watch_models()

    def add(self, model: DistributedDataParallel) -> None:
        if model in [ref() for ref in self._models.values()]:
            return
        self._ranks = tuple(
            dist.get_process_group_ranks(cast("Any", model).process_group)
        )
        self._is_over, self._snapshots, self._last_snapshots = False, [], []
        self._models[self._num_models] = weakref.ref(model, self._forget)
        self._num_models += 1
        self._forget(None)
        if all(ref() is not self for ref in _drifts):
            _drifts.append(weakref.ref(self, _drifts.remove))
        _watch_steps()

    def _forget(self, _: object) -> None:
        self._named = {}

    def count_call(self) -> int:
        """Count a collective of the group; return its number."""
        self._num_calls += 1
        return self._num_calls

    @torch.no_grad()
    def step_done(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step; check its parameters once per phase."""
        self._num_steps += 1
        phase = self._num_calls // self._period
        if self._phases.get(id(optimizer), 0) == phase or self._is_over:
            return
        self._phases[id(optimizer)] = phase
        named = self._parameters()
        groups = [group["params"] for group in optimizer.param_groups]
        own = [named[id(p)] for group in groups for p in group if id(p) in named]
        if own:
            self._check(optimizer, own, phase)

    def _parameters(self) -> dict[int, tuple[str, Tensor]]:
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

    def _check(
        self, optimizer: Optimizer, own: list[tuple[str, Tensor]], phase: int
    ) -> None:
        if phase != self._phase:
            self._last_snapshots, self._snapshots, self._phase = (
                self._snapshots,
                [],
                phase,
            )
        first = phase * _NUM_PARAMETERS
        chosen = [own[i % len(own)] for i in range(first, first + _NUM_PARAMETERS)]
        number = sum(each.num_calls == self._num_calls for each in self._snapshots)
        weights, state = sums_of_parts(dict(chosen), optimizer, first // len(own))
        options = Values.of([], optimizer).options
        self._snapshots.append(
            _Snapshot(self._num_calls, number, weights, state, options)
        )
        try:
            found = self._exchange(phase)
        except RuntimeError:  # raised by the store
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
        """Write this phase's snapshots; return each of the last phase's, by rank."""
        store = self._store.connection
        store.set(f"drift/{self._rank}/{phase % 2}", json.dumps(self._snapshots))
        last = [f"drift/{rank}/{(phase - 1) % 2}" for rank in range(self._size)]
        is_reader = self._rank == 0 or self._mode == "error"
        if not (is_reader and self._last_snapshots and store.check(last)):
            return []
        of_ranks = list(map(_read_snapshots, cast("Any", store).multi_get(last)))
        return [
            {
                rank: snapshots[key]
                for rank, snapshots in zip(self._ranks, of_ranks, strict=True)
                if key in snapshots
            }
            for key in [snapshot[:2] for snapshot in self._last_snapshots]
        ]


def _read_snapshots(text: bytes) -> dict[tuple[int, int], Values]:
    snapshots = [_Snapshot(*snapshot) for snapshot in json.loads(text)]
    return {each[:2]: Values(*each[2:], {}) for each in snapshots}


@cache
def _watch_models() -> None:
    """Register all models that are later wrapped in DistributedDataParallel."""
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
