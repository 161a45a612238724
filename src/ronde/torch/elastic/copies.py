"""Copies of each rank's optimizer state with ``zero=1``, stored on another host.

Note [Versions]
    Every ``copy_every`` steps each rank packs its share and sends a copy to a rank on
    another host. The shares of all ranks after one step are a *version*. Each rank
    stores its last two versions, because other ranks may not have the newest one yet.
    A version is complete if each share exists, as original or copy. When a rank is
    lost, all ranks return to the newest complete version. They divide its state among
    the remaining ranks and repeat the later steps. Before a planned change of ranks,
    they make a version of the last step.
"""

import json
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ronde.errors import UsageError
from ronde.membership.view import NEW
from ronde.session.session import current_session, rank, size
from ronde.torch.elastic.training import Training
from ronde.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
)
from ronde.torch.mpi_ops import alltoall, broadcast_
from ronde.torch.sharded_step import ShardedStep, SharePiece
from ronde.torch.state_trees import rebuild_tree, split_tree

_KEPT = 2
_ALIGNMENT = 8  # bytes


class Version(NamedTuple):
    """The part of a version that one rank stores."""

    step: int
    view: int  # number of the view in which it was made
    size: int  # number of ranks in that view
    shares: dict[int, Tensor]  # packed, by rank
    buffers: dict[str, Tensor]
    rest: tuple[dict[str, Any], list[Any]]  # small state, optimizers' options


class CompleteVersion(NamedTuple):
    """A version of which every share is stored on at least one rank."""

    step: int
    view: int
    sources: list[tuple[int, int]]  # by share: a rank that has it, its numel


class ShareCopies:
    """Makes, stores and restores versions: see Note [Versions]."""

    def __init__(self, shares: Sequence[ShardedStep], every: int) -> None:
        if every < 1:
            raise UsageError(f"copy_every must be at least 1, got {every}.")
        self.shares = shares
        self._every = every
        self._versions: list[Version] = []

    @property
    def newest(self) -> int:
        """The step of the newest version on this rank."""
        return max((each.step for each in self._versions), default=NEW)

    def is_due(self, step: int) -> bool:
        """Return True if a version is due after ``step`` steps."""
        return step % self._every == 0

    def make(self, training: Training) -> None:
        """Make a version of the current step; collective."""
        view = current_session().view
        hosts = [worker.host for worker in view.members] if view else [""]
        own = pack([each.pieces() for each in self.shares])
        shares = {rank(): own}
        if size() > 1:
            keepers = find_keepers(hosts)
            splits = [0] * size()
            splits[keepers[rank()]] = own.numel()
            received = alltoall(own, splits, name="elastic.copies")
            shares[keepers.index(rank())] = received[0]
        number = view.view if view else 0
        named = training.model.named_buffers()
        buffers = {name: each.clone() for name, each in named}
        options = [each.options for each in self.shares]
        kept = deepcopy((training.small_state(), options))
        made = Version(training.num_applied, number, size(), shares, buffers, kept)
        self._versions = [*self._versions[1 - _KEPT :], made]

    def find(self) -> CompleteVersion | None:
        """Return the newest complete version, or None; collective."""
        own = [
            (v.step, v.view, v.size, {r: s.numel() for r, s in v.shares.items()})
            for v in self._versions
        ]
        holders: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = {}
        for holder, versions in enumerate(allgather_object(own)):
            for step, view, num_ranks, shares in versions:
                known = holders.setdefault((step, view, num_ranks), {})
                for owner, numel in shares.items():
                    known.setdefault(owner, (holder, numel))
        complete = [key for key, known in holders.items() if len(known) == key[2]]
        if not complete:
            return None
        step, view, num_ranks = newest = max(complete)
        return CompleteVersion(
            step, view, [holders[newest][r] for r in range(num_ranks)]
        )

    def begin(self, *, is_new: bool) -> None:
        """Cut new shares for the current ranks.

        With ``is_new``, shares that were already cut for this rank and size stay.
        """
        for each in self.shares:
            if not is_new or each.rank_and_size != (rank(), size()):
                each.recut(rank(), size())

    @torch.no_grad()
    def restore(self, found: CompleteVersion, training: Training) -> None:
        """Restore a version, and divide it among the current ranks; collective."""
        self.begin(is_new=False)
        version, holder = self._version(found), found.sources[0][0]
        # Kept until the next version is complete; older ones are no longer needed.
        self._versions = [] if version is None else [version]
        for name, buffer in training.model.named_buffers():
            if version is not None:
                buffer.copy_(version.buffers[name])
        shared = {id(p) for each in self.shares for p in each.parameters}
        named = training.model.state_dict(keep_vars=True).items()
        others = {name: t.data for name, t in named if id(t) not in shared}
        broadcast_parameters(others, holder)
        for owner, (sender, numel) in enumerate(found.sources):
            if rank() == sender and version is not None:
                packed = version.shares[owner]
            else:
                packed = torch.empty(numel, dtype=torch.int64)
            broadcast_(packed, sender, name="elastic.share")
            for each, pieces in zip(self.shares, unpack(packed), strict=True):
                each.put([SharePiece(*piece) for piece in pieces])
        kept = broadcast_object(version and version.rest, holder)
        small, options = deepcopy(kept)
        for each, own in zip(self.shares, options, strict=True):
            each.options = own
        training.load_small_state(small)

    def _version(self, found: CompleteVersion) -> Version | None:
        same = [v for v in self._versions if (v.step, v.view) == found[:2]]
        return same[0] if same else None


def find_keepers(hosts: Sequence[str]) -> list[int]:
    """Choose the rank to store each rank's copy, preferably on another host."""
    order = sorted(range(len(hosts)), key=lambda r: hosts.index(hosts[r]))
    shift = max(Counter(hosts).values()) % len(hosts) or 1
    keepers = [0] * len(hosts)
    for index, each in enumerate(order):
        keepers[each] = order[(index + shift) % len(hosts)]
    return keepers


def pack(value: Any) -> Tensor:
    """Serialize a tree of tensors and plain values into an int64 tensor."""
    tensors: list[Tensor] = []
    text = json.dumps(split_tree(value, tensors)).encode()
    header = len(text).to_bytes(_ALIGNMENT, "little") + text
    parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    parts += [each.detach().cpu().reshape(-1).view(torch.uint8) for each in tensors]
    return torch.cat([_padded(part) for part in parts]).view(torch.int64)


def unpack(packed: Tensor) -> Any:
    """Return the tree that ``pack`` serialized."""
    packed = packed.view(torch.uint8)
    num_bytes = int.from_bytes(packed[:_ALIGNMENT].numpy().tobytes(), "little")
    offset = _ALIGNMENT + num_bytes
    text = packed[_ALIGNMENT:offset].numpy().tobytes()
    tensors: list[Tensor] = []
    value = rebuild_tree(json.loads(text), tensors)
    for tensor in tensors:
        offset += -offset % _ALIGNMENT
        source = packed[offset : offset + tensor.nbytes]
        tensor.copy_(source.view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes
    return value


def _padded(part: Tensor) -> Tensor:
    return torch.nn.functional.pad(part, (0, -part.numel() % _ALIGNMENT))
