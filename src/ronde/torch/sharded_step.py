"""ZeRO's first stage: each rank stores and steps its share of the optimizer's state.

Note [Shares]
    The elements of all parameters of one dtype and device form a *row*. The row is cut
    into equal shares, if necessary inside a parameter. A *part* is a rank's share of
    one parameter, a 1-D view. While the optimizer steps, its groups hold this rank's
    parts instead of the parameters. Then all ranks gather the parts.

    This is correct for optimizers that step each element by itself, and wrong for those
    that use norms of layers, such as LARS and LAMB.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5.1.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, optim
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, SparseAdam

from ronde.collectives import Communicator
from ronde.collectives.objects import broadcast_json
from ronde.data_parallel import Reducer
from ronde.errors import UsageError
from ronde.torch.state_trees import rebuild_tree, split_tree

_ALIGNMENT = 16  # elements
_STAGING_BYTES = 4 << 20  # of one rank's share
_NOT_ELEMENTWISE = (LBFGS, Adafactor, Muon, SparseAdam)
_ELEMENTWISE = (
    *(optim.SGD, optim.ASGD, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
    *(optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
)
_STEP = "step"  # torch's step counter: never cut, even if the parameter is a scalar
_NOT_WHOLE = (
    "with zero=1 this rank has only its share of the state. Call "
    "consolidate_state_dict() on all ranks after the last step, then state_dict() on "
    "its root."
)
_SPARSE = (
    "zero=1 does not support sparse gradients. Pass sparse_as_dense=True to "
    "DistributedOptimizer."
)


class _Part(NamedTuple):
    parameter: int  # its index
    start: int  # of the part, in elements of the parameter's memory
    stop: int
    offset: int  # in the rank's share


class SharePiece(NamedTuple):
    """A slice of a share: parameter values and optimizer state, to build new shares."""

    parameter: int
    start: int
    stop: int
    values: Tensor  # of the parameter
    state: dict[str, Any]  # of the optimizer


@dataclass(slots=True)
class _Row:
    """Parameters of one dtype and device, cut into shares."""

    share_numel: int
    parts: list[list[_Part]]  # by rank
    staging: Tensor | None = None
    addresses: list[int] = field(default_factory=list[int])  # of the parameters
    chunks: "list[_Chunk]" = field(default_factory=list["_Chunk"])


class _Chunk(NamedTuple):
    """The buffer of one all-gather, with the tensors to copy into it and out of it."""

    gathered: Tensor
    own: Tensor  # this rank's slice of ``gathered``
    sent: tuple[list[Tensor], list[Tensor]]
    received: tuple[list[Tensor], list[Tensor]]


def require_elementwise(optimizer: Optimizer, *, is_declared: bool) -> None:
    """Raise ``UsageError`` unless the optimizer updates elements independently."""
    # A subclass that does not override torch's step counts as torch's.
    step = _own_step(type(optimizer))
    known = any(step is _own_step(each) for each in _ELEMENTWISE)
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        cure = "Use zero=0."
    elif known or is_declared:
        return
    else:
        cure = (
            "Pass zero_elementwise=True if it updates each element from that element's "
            "gradient and state alone; otherwise use zero=0."
        )
    raise UsageError(
        "zero=1 needs an optimizer that updates each element independently, got "
        f"{type(optimizer).__name__}. {cure}"
    )


def _own_step(kind: Any) -> object:  # noqa: ANN401  a class
    return inspect.unwrap(kind.step)


class ShardedStep:
    """The step of an optimizer with its state divided among all ranks.

    Parameters must have the same order and values on all ranks, and the same parameters
    must require a gradient.
    """

    def __init__(self, optimizer: Optimizer, rank: int, size: int) -> None:
        self._optimizer, self._rank, self._size = optimizer, rank, size
        self._parameters: list[Tensor] = []
        self._group_of: list[int] = []
        self._rows: list[_Row] = []
        self._parts: dict[_Part, Tensor] = {}
        self._cut: set[int] = set()  # indices of parameters that are in a row
        self._whole: dict[str, Any] | None = None  # all ranks' state, if it is here
        self._communicator: Communicator | None = None
        self.on_stepped: Callable[[], None] | None = None  # called after each step
        self.add_groups()

    def add_groups(self) -> None:
        """Add the parameters of the optimizer's new groups."""
        first = self._group_of[-1] + 1 if self._group_of else 0
        for number, group in enumerate(self._optimizer.param_groups[first:], first):
            self._parameters += group["params"]
            self._group_of += [number] * len(group["params"])

    def step(
        self,
        make_gradients: Callable[[], Any],
        reducer: Reducer,
        *,
        is_closure: bool,
    ) -> Any:  # noqa: ANN401  the optimizer's
        """Step this rank's share, and exchange the parameters; collective.

        ``make_gradients`` computes and reduces the gradients. With ``is_closure`` the
        optimizer calls it and uses its loss.
        """
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]

        def make() -> Any:  # noqa: ANN401  the closure's
            _set_parameters(groups, whole)
            loss = make_gradients()
            _set_parameters(groups, self._own_parts())
            return loss

        try:
            if is_closure:
                result = self._optimizer.step(make)
            else:
                make()
                result = self._optimizer.step()
        finally:
            _set_parameters(groups, whole)
            for part in self._parts.values():
                part.grad = None
        self._whole = None
        self._gather(reducer.communicator)
        if self.on_stepped is not None:
            self.on_stepped()
        return result

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are cut into shares."""
        self._cut_new()
        return [self._parameters[index] for index in sorted(self._cut)]

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups, such as learning rates."""
        groups = self._optimizer.param_groups
        return [{k: v for k, v in each.items() if k != "params"} for each in groups]

    @options.setter
    def options(self, options: list[dict[str, Any]]) -> None:
        for group, new in zip(self._optimizer.param_groups, options, strict=True):
            group.update(new)

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The rank of this share, and the number of shares."""
        return self._rank, self._size

    def recut(self, rank: int, size: int) -> None:
        """Cut new shares and drop all state, which ``put`` restores."""
        self._rank, self._size = rank, size
        self._rows, self._parts, self._cut = [], {}, set()
        self._whole = self._communicator = None
        self._optimizer.state.clear()
        self._cut_new()

    def pieces(self) -> list[SharePiece]:
        """Return all parts of this rank, as views of values and state."""
        self._cut_new()
        pieces: list[SharePiece] = []
        for part in (part for group in self._own_groups() for part in group):
            values = _flat(self._parameters[part.parameter])[part.start : part.stop]
            tensor = self._parts.get(part)
            state = (
                {} if tensor is None else dict(self._optimizer.state.get(tensor, {}))
            )
            pieces.append(SharePiece(*part[:3], values, state))
        return pieces

    @torch.no_grad()
    def put(self, pieces: Sequence[SharePiece]) -> None:
        """Load the parameters of an old share, and the state of this rank's parts."""
        own: dict[int, list[_Part]] = {}
        for part in (part for row in self._rows for part in row.parts[self._rank]):
            own.setdefault(part.parameter, []).append(part)
        for piece in pieces:
            flat = _flat(self._parameters[piece.parameter])
            flat[piece.start : piece.stop] = piece.values
            for part in own.get(piece.parameter, ()):
                if max(piece.start, part.start) < min(piece.stop, part.stop):
                    tensor = self._tensor_of(part)
                    _put_state(self._optimizer.state[tensor], part, piece)

    def state_dict(self) -> dict[str, Any]:
        """Return the full optimizer state that was last loaded or consolidated."""
        if self._whole is None:
            # A rank's share may be empty, and have no state.
            if self._optimizer.state or self._communicator is not None:
                raise UsageError(_NOT_WHOLE)
            return self._in_one({})
        return self._whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of a plain optimizer's state."""
        self._cut_new()
        given = cast("dict[int, dict[str, Any]]", state_dict["state"])
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(parameters) for parameters in whole]:
            raise UsageError(
                "the groups in state_dict must have the optimizer's numbers of "
                f"parameters, {[len(each) for each in whole]}, got {sizes}."
            )
        own = self._own_groups()
        parts = [part for group in own for part in group]
        state = {
            number: {key: _cut_out(key, value, self._parameters[part.parameter], part)
                     for key, value in given[part.parameter].items()}
            for number, part in enumerate(parts)
            if part.parameter in given
        }  # fmt: skip
        numbers = iter(range(len(parts)))
        options = [
            {**options, "params": [next(numbers) for _ in group]}
            for options, group in zip(state_dict["param_groups"], own, strict=True)
        ]
        for each in options:
            each.pop("param_names", None)
        try:
            _set_parameters(groups, self._own_parts())
            self._optimizer.load_state_dict({"state": state, "param_groups": options})
        finally:
            # The optimizer has made new groups.
            _set_parameters(self._optimizer.param_groups, whole)
        self._whole = state_dict

    def consolidate(self, reducer: Reducer, root: int) -> None:
        """Gather the whole state in ``root``'s host memory; collective."""
        if not 0 <= root < self._size:
            raise UsageError(f"root must be in 0..{self._size - 1}, got {root}.")
        if self._communicator is None:
            return  # no step was done: all ranks have the loaded state
        communicator = reducer.communicator
        whole: dict[int, dict[str, Any]] = {}
        own = [
            (part.parameter, part.start, part.stop, self._optimizer.state[tensor])
            for part, tensor in self._parts.items()
            if tensor in self._optimizer.state
        ]
        for owner in range(self._size):
            tensors: list[Tensor] = []
            plain = broadcast_json(communicator, lambda: split_tree(own, []), owner)
            if owner == self._rank:
                split_tree(own, tensors)
                tensors = [tensor.cpu() for tensor in tensors]
                found = own
            else:
                found = rebuild_tree(plain, tensors, "cpu")
            for tensor in tensors:
                communicator.broadcast(tensor, owner).wait()
            if self._rank == root:
                self._put_together(found, whole)
        self._whole = self._in_one(whole) if self._rank == root else None

    def _put_together(
        self,
        found: list[tuple[int, int, int, dict[str, Any]]],
        whole: dict[int, dict[str, Any]],
    ) -> None:
        for index, start, stop, values in found:
            state = whole.setdefault(index, {})
            for key, value in values.items():
                if not _is_cut(key, value, stop - start):
                    state[key] = value
                    continue
                if key not in state:
                    like = torch.empty_like(self._parameters[index], device="meta")
                    state[key] = torch.empty_like(like, dtype=value.dtype, device="cpu")
                _flat(state[key])[start:stop] = value

    def _in_one(self, state: dict[int, dict[str, Any]]) -> dict[str, Any]:
        numbers = iter(range(len(self._parameters)))
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _own_groups(self) -> list[list[_Part]]:
        groups: list[list[_Part]] = [[] for _ in self._optimizer.param_groups]
        for row in self._rows:
            for part in row.parts[self._rank]:
                groups[self._group_of[part.parameter]].append(part)
        return groups

    @torch.no_grad()
    def _own_parts(self) -> list[list[Tensor]]:
        """Return this rank's parts for each group, and set their gradients."""
        self._cut_new()
        groups: list[list[Tensor]] = []
        for group in self._own_groups():
            groups.append([])
            for part in group:
                parameter = self._parameters[part.parameter]
                tensor = self._tensor_of(part)
                grad = parameter.grad
                if grad is not None:
                    if grad.is_sparse:
                        raise UsageError(_SPARSE)
                    flat = _flat(grad, like=parameter)[part.start : part.stop]
                    tensor.grad = flat
                groups[-1].append(tensor)
        return groups

    def _tensor_of(self, part: _Part) -> Tensor:
        value = _flat(self._parameters[part.parameter])[part.start : part.stop]
        if part in self._parts:
            self._parts[part].data = value  # the parameter may have moved
        else:
            self._parts[part] = torch.nn.Parameter(value)
        return self._parts[part]

    def _cut_new(self) -> None:
        """Cut parameters that require a gradient and are not in a row yet."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and index not in self._cut:
                kind = (parameter.dtype, parameter.device)
                kinds.setdefault(kind, []).append(index)
                self._cut.add(index)
        for members in kinds.values():
            lengths = [self._parameters[index].numel() for index in members]
            share = -(-sum(lengths) // self._size)
            share = -(-share // _ALIGNMENT) * _ALIGNMENT
            parts = _cut(members, lengths, share, self._size)
            self._rows.append(_Row(share, parts))

    @torch.no_grad()
    def _gather(self, communicator: Communicator) -> None:
        """Exchange parts, after each rank has stepped its own; collective."""
        if communicator is not self._communicator:
            self._communicator = communicator
            for row in self._rows:
                row.staging = None
        for row in self._rows:
            self._prepare(row, communicator)
            for chunk in row.chunks:
                _copy(*chunk.sent)
                communicator.all_gather(chunk.own, out=chunk.gathered).wait()
                _copy(*chunk.received)

    def _prepare(self, row: _Row, communicator: Communicator) -> None:
        """Make the chunks of a row, unless its parameters' addresses are unchanged."""
        first = self._parameters[next(p.parameter for own in row.parts for p in own)]
        width = min(row.share_numel, _STAGING_BYTES // first.element_size())
        indices = dict.fromkeys(part.parameter for own in row.parts for part in own)
        addresses = [self._parameters[index].data_ptr() for index in indices]
        if row.staging is not None and addresses == row.addresses:
            return
        if row.staging is None:
            numel = width * self._size
            row.staging = communicator.allocate(numel, first.dtype, first.device)
        row.addresses = addresses
        row.chunks = [
            self._chunk(row, row.staging, start, min(start + width, row.share_numel))
            for start in range(0, row.share_numel, width)
        ]

    def _chunk(self, row: _Row, staging: Tensor, start: int, stop: int) -> _Chunk:
        gathered = staging[: (stop - start) * self._size]
        by_rank = cast("tuple[Tensor, ...]", gathered.split(stop - start))
        chunk = _Chunk(gathered, by_rank[self._rank], ([], []), ([], []))
        for rank, (parts, share) in enumerate(zip(row.parts, by_rank, strict=True)):
            for part in parts:
                low = max(start, part.offset)
                high = min(stop, part.offset + part.stop - part.start)
                if low >= high:
                    continue
                flat = _flat(self._parameters[part.parameter])
                first = part.start + low - part.offset
                value = flat[first : first + high - low]
                staged = share[low - start : high - start]
                if rank == self._rank:
                    chunk.sent[0].append(staged)
                    chunk.sent[1].append(value)
                else:
                    chunk.received[0].append(value)
                    chunk.received[1].append(staged)
        return chunk


def _cut(
    members: Sequence[int], lengths: Sequence[int], share: int, size: int
) -> list[list[_Part]]:
    parts: list[list[_Part]] = [[] for _ in range(size)]
    position = 0
    for index, length in zip(members, lengths, strict=True):
        start = 0
        while start < length:
            rank, offset = divmod(position, share)
            stop = min(length, start + share - offset)
            parts[rank].append(_Part(index, start, stop, offset))
            position += stop - start
            start = stop
    return parts


def _flat(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements as a vector, in memory order of ``like`` or ``tensor``."""
    strides = (tensor if like is None else like).stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    ordered = tensor.detach().permute(order)
    return ordered.view(-1) if like is None else ordered.reshape(-1)


def _cut_out(key: str, value: object, parameter: Tensor, part: _Part) -> object:
    if key == _STEP or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return _flat(value, like=parameter)[part.start : part.stop].clone()


def _put_state(state: dict[str, Any], part: _Part, piece: SharePiece) -> None:
    """Copy the state of ``piece`` where it overlaps with ``part``."""
    start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
    for key, value in piece.state.items():
        if not _is_cut(key, value, piece.stop - piece.start):
            state[key] = value
            continue
        if key not in state:
            state[key] = value.new_empty(part.stop - part.start)
        source = value[start - piece.start : stop - piece.start]
        state[key][start - part.start : stop - part.start] = source


def _is_cut(key: str, value: object, numel: int) -> bool:
    is_tensor = isinstance(value, Tensor)
    return key != _STEP and is_tensor and value.shape == (numel,)


def _set_parameters(
    groups: Sequence[dict[str, Any]], parameters: Sequence[list[Tensor]]
) -> None:
    for group, own in zip(groups, parameters, strict=True):
        group["params"] = own


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]
