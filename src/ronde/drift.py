"""Detection of ranks with different weights or optimizer states.

Note [Drift detection]
    After an optimizer step every rank computes checksums of some parameters, and of one
    state tensor of each. The next sample has other parameters. Some bits of the
    checksums, and the complements of these bits, travel with a collective that runs
    anyway. If only some ranks have a bit, all ranks see at once that they differ. A
    rank without checksums sends zeros.

    Eight parameters after every eighth step take much less time than one after each
    step: code that runs once a step is no longer in the processor's caches.

    After such a difference the ranks compare everything and report. Values that
    are equal again by then are not reported: a program may make ranks differ for a
    while.

    A checksum is a sum of integers, which is exact in any order.
"""

import hashlib
import json
import logging
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.collectives.objects import TensorGroup, all_gather_json
from ronde.errors import CollectiveError

PERIOD = 8  # steps between samples, and parameters of a sample
_NUM_BITS = 16
NUM_FLAGS = 2 * _NUM_BITS
_FACTOR = -7046029254386353131  # 2**64 / golden ratio, odd, as a signed number
_FIRST_BIT = 40
_HALF_BITS = 32
_CPU_PART_BYTES = 256 << 10
_PART_BYTES = 16 << 20  # on an accelerator
_NUM_SAMPLED = 64
_UNNAMED = r"parameter \d+ of param_groups\[\d+\]"
_OPTION = r"\w+ of param_groups\[\d+\]|the optimizer's class"
_MAX_UNCONFIRMED = 3
_BEGAN_APART = (
    "the ranks began with different weights. Call "
    "broadcast_parameters(model.state_dict(), root_rank=0) before training."
)
_ROUNDED = (
    "rounding, with nondeterministic kernels or different processors; or a small "
    "change that only some ranks made."
)
_CHANGED = (
    "only some ranks changed weights or reduced gradients (such as by a checkpoint or "
    "clipping), or skipped a step."
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
            return f"{self.name} on {_text(self.ranks)} differs from {others}"
        return f"{self.name} differs between {_text(self.ranks)}"


@dataclass(frozen=True, slots=True)
class Drift:
    """The differences between the ranks, and their likely cause.

    Attributes:
        differences: Weights first, then the optimizer's state and options.
        num_compared: The number of compared values.
        distance: The largest difference in a sample of the first differing weight,
            relative to the sample's largest value; None if unknown.
        cause: One or two sentences; empty without differences.
        num_weights: The number of weights among the differences.
    """

    differences: tuple[RankDifference, ...]
    num_compared: int
    distance: float | None = None
    cause: str = ""
    num_weights: int = 0

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.num_compared} values are the same on all ranks"
        by = f" (by {self.distance:.2g} of its largest value)" if self.distance else ""
        num_others = len(self.differences) - 1
        others = f", and {num_others} more of {self.num_compared} values"
        return (
            f"{self.differences[0]}{by}{others if num_others else ''}. Likely cause: "
            f"{self.cause}"
        )


@dataclass(frozen=True, slots=True)
class Background:
    """Facts about the ranks that help to explain differences."""

    ranks: tuple[int, ...] = ()  # the carrier's ranks in the job; empty for all
    is_compared: bool = True  # if False, this rank only receives the result
    did_begin_equal: bool | None = None  # None if unknown
    is_reducing: bool = False  # only named parameters are reduced


class Values(NamedTuple):
    """The values of one rank that are compared with other ranks' values, by name."""

    weights: dict[str, str]  # shape, dtype and checksum
    state: dict[str, Any]  # the same, and numbers
    options: dict[str, Any]
    samples: dict[str, list[float]]  # some elements of weights

    @classmethod
    def of(cls, named: Named, optimizer: Optimizer | None = None) -> "Values":
        values = cls({}, {}, {}, {})
        for name, parameter in named:
            values.weights[name] = _describe(parameter)
            values.samples[name] = _sample(parameter)
            for key, value in _state_of(optimizer, parameter).items():
                values.state[f"{key} of {name}"] = _plain(value)
        if optimizer is not None:
            values.options["the optimizer's class"] = type(optimizer).__name__
            for number, group in enumerate(optimizer.param_groups):
                for option, value in group.items():
                    if option != "params":
                        name = f"{option} of param_groups[{number}]"
                        values.options[name] = _plain(value)
        return values


def compare(
    carrier: TensorGroup,
    named: Named,
    optimizer: Optimizer | None = None,
    known: Background = Background(),
) -> Drift:
    """Compare weights, optimizer state and options between ranks. Collective."""
    own = dict(named)
    if known.is_reducing and optimizer is not None:
        own |= dict(_unnamed(optimizer, own.values()))
    mine = Values.of(own.items(), optimizer)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = all_gather_json(carrier, digest if known.is_compared else "")
    if len({each for each in digests if each}) < 2:
        return Drift((), sum(map(len, mine[:3])))
    gathered = all_gather_json(carrier, mine if known.is_compared else None)
    ranks = known.ranks or range(carrier.size)
    everyone = {r: Values(*v) for r, v in zip(ranks, gathered, strict=True) if v}
    return judge(everyone, known)


def judge(everyone: Mapping[int, Values], known: Background) -> Drift:
    """Return the differences between the values of all ranks, and their likely cause.

    Weights and state that only some ranks have count as sharded, and are left out.
    """
    found: list[RankDifference] = []
    num_compared = num_weights = 0
    for kind in ("weights", "state", "options"):
        of_ranks = {rank: getattr(values, kind) for rank, values in everyone.items()}
        names = dict.fromkeys(name for each in of_ranks.values() for name in each)
        if kind != "options":
            names = [n for n in names if all(n in each for each in of_ranks.values())]
        num_compared += len(names)
        found += filter(None, (_difference(name, of_ranks) for name in names))
        num_weights = len(found) if kind == "weights" else num_weights
    if not found:
        return Drift((), num_compared)
    distance = _distance(found[0], everyone)
    cause = _cause_of(found, distance, known)
    return Drift(tuple(found), num_compared, distance, cause, num_weights)


def _unnamed(optimizer: Optimizer, named: Iterable[Tensor]) -> Named:
    known = {id(parameter) for parameter in named}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                yield f"parameter {index} of param_groups[{number}]", parameter


def _state_of(optimizer: Optimizer | None, parameter: Tensor) -> Mapping[str, Any]:
    state = None if optimizer is None else optimizer.state.get(parameter)
    return cast("dict[str, Any]", state) if isinstance(state, dict) else {}


def _plain(value: Any) -> Any:  # noqa: ANN401  an optimizer's
    """Convert a value to JSON's types, a tensor to its checksum."""
    if isinstance(value, Tensor):
        return _describe(value) if value.dim() else _plain(value.item())
    if isinstance(value, tuple | list):
        return [_plain(each) for each in cast("list[Any]", value)]
    if isinstance(value, complex):
        return str(value)
    return value if isinstance(value, int | float | str) else None


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {sum_of_words(tensor):016x}"


def _sample(tensor: Tensor) -> list[float]:
    """Return evenly spaced elements of a tensor."""
    if not is_plain(tensor) or not tensor.numel():
        return []
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() // _NUM_SAMPLED)
    return cast("Any", flat[::step].real.to(torch.float64)).tolist()


def _difference(
    name: str, everyone: Mapping[int, Mapping[str, Any]]
) -> RankDifference | None:
    values = {rank: each.get(name, "missing") for rank, each in everyone.items()}
    keys = {rank: json.dumps(value) for rank, value in values.items()}
    (most, num_most), *others = Counter(keys.values()).most_common()
    if not others:
        return None
    has_majority = num_most > others[0][1]
    majority = [r for r, key in keys.items() if key == most] if has_majority else []
    ranks = [r for r in keys if r not in majority]
    return RankDifference(name, tuple(ranks), tuple(majority), values)


def _distance(
    difference: RankDifference, everyone: Mapping[int, Values]
) -> float | None:
    samples = [each.samples.get(difference.name, []) for each in everyone.values()]
    columns = list(zip(*samples, strict=False))
    if len(set(map(len, samples))) > 1 or not columns:
        return None
    apart = max(max(column) - min(column) for column in columns)
    largest = max(map(abs, chain(*samples)))
    is_known = isfinite(apart) and isfinite(largest) and largest > 0
    return apart / largest if is_known and apart else None


def _cause_of(
    differences: Sequence[RankDifference], distance: float | None, known: Background
) -> str:
    for difference in differences:
        unnamed = re.search(f"(^| of )({_UNNAMED})$", difference.name)
        if known.is_reducing and unnamed is not None:
            return (
                f"{unnamed[2]} was added to the wrapped optimizer, and its gradient is "
                "not reduced. Use add_param_group() of the DistributedOptimizer."
            )
    for difference in differences:
        name, values = difference.name, _values(difference)
        if name.startswith("step of "):
            return (
                f"some ranks skipped a step: the optimizer has counted {values}. Call "
                "step() equally often on all ranks."
            )
        if re.fullmatch(_OPTION, name):
            return (
                f"{name} is {values}. Give all ranks the same options, and step a "
                "scheduler on all of them."
            )
    if known.did_begin_equal is False:
        return _BEGAN_APART
    dtype = str(next(iter(differences[0].values.values()))).rpartition(" ")[0]
    is_double = dtype.endswith("float64")
    is_rounding = distance is not None and distance < (1e-14 if is_double else 2e-6)
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
    """Return True for a tensor with memory that can be read as integers."""
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        return False
    return value.layout is torch.strided and not value.is_meta


def read_words(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a vector of integers, in memory order."""
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
    """Return a 64-bit checksum of a whole tensor; 0 if the tensor cannot be read.

    It depends on the order of the elements, and costs little memory.
    """
    total = 0
    if is_plain(tensor):
        words = read_words(tensor)
        size = _part_bytes(words) // words.itemsize
        for number, start in enumerate(range(0, words.numel(), size)):
            part = words[start : start + size].to(torch.int64)
            part = part ^ (part >> _HALF_BITS)  # the low bits of whole numbers are zero
            weights = _weights(size, part.device)[: part.numel()]
            total += (2 * number + 1) * int(part.mul_(weights).sum())
    return total % (1 << 64)


@cache
def _weights(size: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, to detect symmetric changes."""
    numbers = torch.arange(1, size + 1, device=device).mul_(_FACTOR)
    return numbers.bitwise_xor_(numbers >> _HALF_BITS).mul_(_FACTOR).bitwise_or_(1)


def _part_bytes(tensor: Tensor) -> int:
    return _CPU_PART_BYTES if tensor.is_cpu else _PART_BYTES


def _checksum(tensor: Tensor, turn: int) -> Tensor:
    """Return the sum of one part of a tensor; ``turn`` selects the part cyclically."""
    words = read_words(tensor)
    part = _part_bytes(words) // words.itemsize
    num_parts = -(-words.numel() // part)
    if num_parts > 1:
        words = words[turn % num_parts * part :][:part]
    return words.sum()


@cache
def _masks(device: torch.device) -> tuple[Tensor, Tensor]:
    bits = torch.arange(_FIRST_BIT, _FIRST_BIT + _NUM_BITS, device=device)
    complements = torch.arange(NUM_FLAGS, device=device) >= _NUM_BITS
    return bits.repeat(2), complements.to(torch.int64)


def sums_of_parts(
    parameters: Mapping[str, Tensor], optimizer: Optimizer, turn: int
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return checksums of a part of each parameter and of its state, by name.

    The state also has the number of steps, unless that is on an accelerator.
    """
    sums: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for name, parameter in parameters.items():
        if is_plain(parameter):
            sums[0][name] = _checksum(parameter, turn)
            for key, tensor, part in _tensor_of_state(optimizer, parameter, turn):
                sums[1][f"{key} of {name}"] = _checksum(tensor, part)
    # One wait for all sums on an accelerator.
    found = iter(_read_all([*sums[0].values(), *sums[1].values()]))
    weights, state = ({name: f"{next(found):x}" for name in each} for each in sums)
    for name in weights:
        count = _state_of(optimizer, parameters[name]).get("step")
        if not isinstance(count, Tensor) or (count.is_cpu and not count.dim()):
            state[f"step of {name}"] = _plain(count)
    return weights, state


def _read_all(sums: Sequence[Tensor]) -> list[int]:
    if len({each.device for each in sums}) == 1:
        return cast("Any", torch.stack(list(sums))).tolist()
    return [int(each) for each in sums]


def _tensor_of_state(
    optimizer: Optimizer, parameter: Tensor, turn: int
) -> list[tuple[str, Tensor, int]]:
    """Return the state tensor to check in this turn, if any, with its name and part."""
    state = [
        (key, value)
        for key, value in _state_of(optimizer, parameter).items()
        if is_plain(value) and value.device == parameter.device
    ]
    if not state:
        return []
    part, index = divmod(turn, len(state))
    return [(*state[index], part)]


class DriftCheck:
    """Periodic checksums of samples of the parameters and their state.

    ``mode`` is off, warn or error.
    """

    def __init__(self, mode: str) -> None:
        self.num_steps = 0  # of this rank, for the report
        self._mode = mode
        self._is_over = mode == "off"
        self._num_unconfirmed = 0
        self._num_sampled = self._num_since_restart = 0
        self._known: object = None  # the source of ``_parameters``
        self._parameters: list[Tensor] = []
        self._is_state_sampled = True
        self._optimizer: weakref.ref[Optimizer] | None = None
        self.sums: list[Tensor] = []  # since the last ``pop_flags``

    def step_done(self, optimizer: Optimizer) -> None:
        """Count an optimizer step, and take a sample every ``PERIOD`` steps."""
        if not (self._is_over or self._num_since_restart % PERIOD):
            self._sample(optimizer)
        self._num_since_restart += 1
        self.num_steps += 1

    def _sample(self, optimizer: Optimizer) -> None:
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        known = id(optimizer), lengths
        if known != self._known:
            self._known = known
            self._optimizer = weakref.ref(optimizer)
            every = [p for group in optimizer.param_groups for p in group["params"]]
            self._parameters = list(filter(is_plain, every))
        for _ in range(min(PERIOD, len(self._parameters))):
            turn, index = divmod(self._num_sampled, len(self._parameters))
            self._num_sampled += 1
            parameter = self._parameters[index]
            self.sums.append(_checksum(parameter, turn))
            if self._is_state_sampled:
                for _, tensor, part in _tensor_of_state(optimizer, parameter, turn):
                    self.sums.append(_checksum(tensor, part))

    def pop_flags(self) -> Tensor | None:
        """Return the checksums since the last call as ``NUM_FLAGS`` zeros and ones."""
        if not self.sums:
            return None
        total = self.sums[0]
        for other in self.sums[1:]:
            total = total.mul_(3).add_(other.to(total.device))
        self.sums.clear()
        shifts, complements = _masks(total.device)
        total = total ^ (total >> _HALF_BITS)  # else a change of sign would be lost
        return (total.mul_(_FACTOR) >> shifts).bitwise_and_(1).bitwise_xor_(complements)

    def restart(self) -> None:
        """Restart at the first parameter; call on all ranks after some have joined."""
        self._num_sampled = self._num_since_restart = 0
        self.sums.clear()

    def report(self, carrier: TensorGroup, named: Named, known: Background) -> None:
        """Warn of differing weights, or raise, and stop checking. Collective.

        State, such as error feedback, may differ on purpose. If only state differs,
        only weights are checked from then on.

        Raises:
            CollectiveError: Weights differ, and the mode is error.
        """
        optimizer = self._optimizer and self._optimizer()
        known = replace(known, is_compared=known.is_compared and self._num_sampled > 0)
        drift = compare(carrier, named, optimizer, known)
        self.sums.clear()
        if drift.num_weights:
            self._is_over = True
            is_first = carrier.rank == 0
            report(drift, self._mode, self.num_steps, is_first=is_first)
            return
        self._num_unconfirmed += 1
        self._is_state_sampled &= drift.is_equal
        self._is_over |= self._num_unconfirmed == _MAX_UNCONFIRMED


def report(drift: Drift, mode: str, num_steps: int, *, is_first: bool) -> None:
    """Raise in mode ``error``; in mode ``warn`` log a warning on the first rank."""
    text = f"The ranks have drifted apart, seen after step {num_steps}: {drift}"
    if mode == "error":
        raise CollectiveError(text)
    if is_first and mode == "warn":
        _logger.warning("%s RONDE_DRIFT=off turns this check off.", text)


def is_apart(flags: Sequence[float]) -> bool:
    """Return True if the flags, summed over all ranks, show a difference."""
    bits, complements = flags[:_NUM_BITS], flags[_NUM_BITS:]
    return any(bits) and any(
        bit and other for bit, other in zip(bits, complements, strict=True)
    )
