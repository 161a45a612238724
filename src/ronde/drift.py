"""Finds ranks whose weights or optimizer states differ.

Note [How drift is found]
    After an optimizer step every rank takes checksums of some parameters, and of one
    tensor of the state of each, the next time of others. Bits of them travel with a
    collective that runs anyway, and so do their complements: a bit that only some ranks
    have shows to all ranks at once that they differ. A rank without checksums sends
    zeros.

    Eight parameters after every eighth step take much less time than one after each:
    code that runs once a step is no longer in the processor's caches.

    Only then do the ranks compare everything, and report what differs. What is equal
    again by then is not reported: a program may have ranks differ for a while.

    A checksum is a sum of integers, which is exact in any order.
"""

import hashlib
import json
import logging
import re
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.collectives.objects import Carrier, all_gather_json
from ronde.errors import CollectiveError

PERIOD = 8  # steps between looks, and parameters that a look is at
_NUM_BITS = 16
NUM_FLAGS = 2 * _NUM_BITS
_FACTOR = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed number
_FIRST_BIT = 40
_CPU_PART_BYTES = 256 << 10
_PART_BYTES = 16 << 20  # on an accelerator
_OPTION = r"\w+ of param_groups\[\d+\]"
_ROUNDING = 1e-4  # of the largest value; below it a difference may come from rounding
_MAX_UNCONFIRMED = 3
_BEGAN_APART = (
    "the ranks began with different weights. Call "
    "broadcast_parameters(model.state_dict(), root_rank=0) before training."
)
_ROUNDED = (
    "rounding, by kernels that are not deterministic, or processors that are not alike."
)
_CHANGED = (
    "some ranks changed weights or reduced gradients in a way of their own (such as by "
    "a checkpoint or clipping), or skipped a step."
)
_logger = logging.getLogger("ronde")

Named = Iterable[tuple[str, Tensor]]


class RankDifference(NamedTuple):
    """A value that is not the same on all ranks."""

    name: str
    ranks: tuple[int, ...]  # without the majority's value; all if there is no majority
    majority: tuple[int, ...]
    values: dict[int, Any]  # by rank: of a tensor its shape, dtype and checksum

    def __str__(self) -> str:
        if self.majority:
            others = _text(self.majority)
            return f"{self.name} on {_text(self.ranks)} is not what it is on {others}"
        return f"{self.name} differs between {_text(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Drift:
    """What differs between the ranks, and why.

    Attributes:
        differences: Parameters first, then the optimizer's state and options.
        num_compared: Values, on this rank.
        distance: How far the first parameter that differs is apart, relative to its
            largest value; None if no parameter differs or shapes do.
        cause: The likely one, in a sentence or two; empty if nothing differs.
    """

    differences: tuple[RankDifference, ...]
    num_compared: int
    distance: float | None = None
    cause: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.num_compared} values are the same on all ranks"
        by = (
            ""
            if self.distance is None
            else f" (by up to {self.distance:.2g} of its largest value)"
        )
        num_others = len(self.differences) - 1
        others = f", and {num_others} more of {self.num_compared} values"
        return (
            f"{self.differences[0]}{by}{others if num_others else ''}. Likely cause: "
            f"{self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Background:
    """What is known of the ranks besides their values."""

    ranks: tuple[int, ...] = ()  # the carrier's ranks among all; empty if they are all
    has_say: bool = True  # whether this rank's values count; else it only learns
    did_begin_equal: bool | None = None  # whether parameters were equal, if known
    # Whether what is named is reduced: then what else the optimizer has is not.
    is_reducing: bool = False


def compare(
    carrier: Carrier,
    named: Named,
    optimizer: Optimizer | None = None,
    known: Background = Background(),
) -> Drift:
    """Compare parameters, and their optimizer's state and options; collective.

    What some ranks do not have is left out.
    """
    parameters = dict(named)
    unnamed = {}
    if known.is_reducing and optimizer is not None:
        unnamed = dict(_unnamed(optimizer, parameters.values()))
    parameters |= unnamed
    tensors, numbers = dict(parameters), dict[str, Any]()
    if optimizer is not None:
        _add_options(optimizer, numbers)
        _add_state(optimizer, parameters, tensors, numbers)
    sums = {n: _describe(t) for n, t in tensors.items()} if known.has_say else {}
    mine = {**sums, **numbers} if known.has_say else {}
    digest = hashlib.sha256(json.dumps(mine, default=str).encode()).hexdigest()
    digests = all_gather_json(carrier, digest if known.has_say else "")
    if len({each for each in digests if each}) < 2:
        return Drift((), len(mine))
    gathered = all_gather_json(carrier, mine)
    numbering = known.ranks or range(carrier.size)
    everyone = {r: each for r, each in zip(numbering, gathered, strict=True) if each}
    # State that only some ranks have is sharded.
    one, *others = everyone.values()
    names = [name for name in one if all(name in other for other in others)]
    found = [d for name in names if (d := _difference(name, everyone)) is not None]
    if not found:
        return Drift((), len(names))
    first = next((d for d in found if d.name in parameters), None)
    distance = None
    if first is not None and _is_comparable(first):
        root = list(numbering).index((first.majority or first.ranks)[0])
        distance = _distance(
            carrier, parameters[first.name], root, has_say=known.has_say
        )
    cause = _cause_of(found, set(unnamed), distance, known)
    return Drift(tuple(found), len(names), distance, cause)


def _unnamed(optimizer: Optimizer, named: Iterable[Tensor]) -> Named:
    known = {id(parameter) for parameter in named}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                yield f"parameter {index} of param_groups[{number}]", parameter


def _add_options(optimizer: Optimizer, numbers: dict[str, Any]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option != "params":
                numbers[f"{option} of param_groups[{number}]"] = _plain(value)


def _add_state(
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
) -> None:
    for name, parameter in parameters.items():
        for key, value in _state_of(optimizer, parameter).items():
            if isinstance(value, Tensor) and value.dim():
                tensors[f"{key} of {name}"] = value
            else:
                numbers[f"{key} of {name}"] = _plain(value)


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    state = optimizer.state.get(parameter)
    return cast("dict[str, Any]", state) if isinstance(state, dict) else {}


def _plain(value: Any) -> Any:  # noqa: ANN401  an optimizer's
    """Return what JSON can carry of an option: numbers, text and lists of them."""
    if isinstance(value, Tensor):
        return cast("Any", value).tolist()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in cast("list[Any]", value)]
    return value if isinstance(value, int | float | str) else None


def _describe(tensor: Tensor) -> str:
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    return f"{kind} {sum_of_words(tensor):016x}"


def _difference(
    name: str, everyone: dict[int, dict[str, Any]]
) -> RankDifference | None:
    values = {rank: each[name] for rank, each in everyone.items()}
    keys = {rank: json.dumps(value) for rank, value in values.items()}
    (most, num_most), *others = Counter(keys.values()).most_common()
    if not others:
        return None
    has_majority = num_most > others[0][1]
    majority = [r for r, key in keys.items() if key == most] if has_majority else []
    ranks = [r for r in keys if r not in majority]
    return RankDifference(name, tuple(ranks), tuple(majority), values)


def _is_comparable(difference: RankDifference) -> bool:
    """Return whether it has one shape and dtype."""
    kinds = {str(v).rpartition(" ")[0] for v in difference.values.values()}
    return len(kinds) == 1


@torch.no_grad()
def _distance(carrier: Carrier, tensor: Tensor, root: int, *, has_say: bool) -> float:
    """Return how far a tensor is from the root's anywhere, of its largest value."""
    theirs = tensor.detach().clone(memory_format=torch.contiguous_format)
    carrier.broadcast(theirs, root).wait()
    dtype = torch.complex128 if theirs.is_complex() else torch.float64
    theirs = theirs.to(dtype)
    own = tensor.detach().to(dtype) if has_say else theirs
    pair = [float((own - theirs).abs().max()), float(theirs.abs().max())]
    apart, largest = map(max, zip(*all_gather_json(carrier, pair), strict=True))
    return apart / largest if largest else apart


def _cause_of(
    differences: Sequence[RankDifference],
    unreduced: set[str],
    distance: float | None,
    known: Background,
) -> str:
    names = {difference.name: difference for difference in differences}
    local = [
        u for u in unreduced if any(n == u or n.endswith(f" of {u}") for n in names)
    ]
    if local:
        return (
            f"{local[0]} was added behind the DistributedOptimizer, and its gradient "
            "is not reduced. Use add_param_group() of the DistributedOptimizer."
        )
    for name, difference in names.items():
        if name.startswith("step of "):
            return (
                f"some ranks skipped a step: the optimizer has counted "
                f"{_values(difference)}. Call step() equally often on all ranks."
            )
        if re.fullmatch(_OPTION, name):
            return (
                f"{name} is {_values(difference)}. Give all ranks the same options, "
                "and step a scheduler on all of them."
            )
    if known.did_begin_equal is False:
        return _BEGAN_APART
    is_rounding = distance is not None and distance < _ROUNDING
    return _ROUNDED if is_rounding else _CHANGED


def _values(difference: RankDifference) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in difference.values.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        by_value.setdefault(text, []).append(rank)
    return " and ".join(f"{v} on {_text(ranks)}" for v, ranks in by_value.items())


def _text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return whether it is a tensor whose memory can be read as integers."""
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return False
    return value.layout is torch.strided and not value.is_meta


def read_words(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers, one-dimensional, in order of memory."""
    flat = tensor.detach()
    if not flat.is_contiguous():
        order = sorted(range(flat.dim()), key=flat.stride, reverse=True)
        flat = flat.permute(order).contiguous()
    flat = flat.view(-1)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if flat.nbytes % dtype.itemsize == 0:
            if flat.storage_offset() * flat.itemsize % dtype.itemsize:
                flat = flat.clone()
            return flat.view(dtype)
    return flat.view(torch.uint8)


def sum_of_words(tensor: Tensor) -> int:
    """Return the checksum of all of a tensor, 64 bits; 0 if it cannot be read."""
    return int(read_words(tensor).sum()) % (1 << 64) if is_plain(tensor) else 0


def _checksum(tensor: Tensor, turn: int) -> Tensor:
    """Return the sum of a part of a tensor: all of it over the turns."""
    words = read_words(tensor)
    part_bytes = _CPU_PART_BYTES if words.is_cpu else _PART_BYTES
    part = part_bytes // words.itemsize
    num_parts = -(-words.numel() // part)
    if num_parts > 1:
        words = words[turn % num_parts * part :][:part]
    return words.sum()


@cache
def _masks(device: torch.device) -> tuple[Tensor, Tensor]:
    bits = torch.arange(_FIRST_BIT, _FIRST_BIT + _NUM_BITS, device=device)
    complements = torch.arange(NUM_FLAGS, device=device) >= _NUM_BITS
    return bits.repeat(2), complements.to(torch.int64)


class FlagReader:
    """Reads sums of flags, of an accelerator those before the last: not to wait."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, torch.Event] | None = None

    def read(self, flags: Tensor, step: int) -> tuple[list[float], int] | None:
        """Return flags and the ``step`` that they came with; None if there are none."""
        if not flags.is_cpu:
            here = torch.empty_like(flags, device="cpu", pin_memory=True)
            here.copy_(flags, non_blocking=True)
            is_here = torch.Event(flags.device)
            is_here.record()
            last, self._last = self._last, (here, step, is_here)
            if last is None:
                return None
            flags, step, is_here = last
            is_here.synchronize()
        return cast("list[float]", flags.real.tolist()), step


class DriftCheck:
    """Looks at parameters and their state in turn, some after each step."""

    def __init__(self, mode: str) -> None:
        """Begin; ``mode`` is off, warn or error."""
        self.num_steps = 0  # that this rank took, for the report
        self._mode = mode
        self._is_over = mode == "off"
        self._num_unconfirmed = 0
        self._num_looks = self._num_since_restart = 0
        self._known: object = None  # what ``_parameters`` was made from
        self._parameters: list[Tensor] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._sums: list[Tensor] = []

    def step_done(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped; look, if it is time to."""
        if not (self._is_over or self._num_since_restart % PERIOD):
            self.look(optimizer)
        self._num_since_restart += 1
        self.num_steps += 1

    def look(self, optimizer: Optimizer, among: Container[int] | None = None) -> None:
        """Take checksums of what is next in turn, for ``take_flags``.

        If ``among`` is given, looks only at parameters whose ``id`` is in it.
        """
        if self._is_over:
            return
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        known = id(optimizer), lengths
        if known != self._known:
            self._known = known
            self._optimizer = weakref.ref(optimizer)
            every = [p for group in optimizer.param_groups for p in group["params"]]
            self._parameters = [
                p for p in every if is_plain(p) and (among is None or id(p) in among)
            ]
        for _ in range(min(PERIOD, len(self._parameters))):
            turn, index = divmod(self._num_looks, len(self._parameters))
            self._num_looks += 1
            self._look_at(optimizer, self._parameters[index], turn)

    def _look_at(self, optimizer: Optimizer, parameter: Tensor, turn: int) -> None:
        self._sums.append(_checksum(parameter, turn))
        state = [
            value
            for value in _state_of(optimizer, parameter).values()
            if is_plain(value) and value.device == parameter.device
        ]
        if state:
            number, index = divmod(turn, len(state))
            self._sums.append(_checksum(state[index], number))

    def take_flags(self) -> Tensor | None:
        """Return ``NUM_FLAGS`` zeros and ones of the looks since the last call."""
        if not self._sums:
            return None
        total = self._sums[0]
        for other in self._sums[1:]:
            total = total.mul_(3).add_(other.to(total.device))
        self._sums.clear()
        shifts, complements = _masks(total.device)
        return (total.mul_(_FACTOR) >> shifts).bitwise_and_(1).bitwise_xor_(complements)

    def restart(self) -> None:
        """Begin with the first parameter again; ranks that had joined are behind."""
        self._num_looks = self._num_since_restart = 0
        self._sums.clear()

    def report(self, carrier: Carrier, named: Named, known: Background) -> None:
        """Warn of what differs, or raise; look no more then. Collective.

        Raises:
            CollectiveError: There is a difference, and the mode is error.
        """
        optimizer = self._optimizer and self._optimizer()
        if optimizer is None:
            known = replace(known, has_say=False)
        drift = compare(carrier, named, optimizer, known)
        if drift.is_equal:
            self._num_unconfirmed += 1
            self._is_over |= self._num_unconfirmed == _MAX_UNCONFIRMED
            return
        self._is_over = True
        text = (
            f"The ranks have drifted apart, seen after step {self.num_steps}: {drift}"
        )
        if self._mode == "error":
            raise CollectiveError(text)
        if carrier.rank == 0 and self._mode == "warn":
            _logger.warning("%s RONDE_DRIFT=off turns this check off.", text)


def is_apart(flags: Sequence[float]) -> bool:
    """Return whether the sums of all ranks' flags show a difference."""
    bits, complements = flags[:_NUM_BITS], flags[_NUM_BITS:]
    return any(bits) and any(
        bit and other for bit, other in zip(bits, complements, strict=True)
    )
