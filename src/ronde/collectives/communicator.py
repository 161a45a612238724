"""The interface of all collectives.

Rules that hold for every call:

* It is collective: every rank of the communicator makes the same calls in the same
  order, with equal dtype and, unless stated otherwise, equal shape.
* It returns at once if the engine can. The result is complete after ``Work.wait()``;
  until then neither input nor output may be touched. Calls with uneven shapes may block
  until all ranks have made the call.
* Tensors may have any layout; results of in-place calls keep it.
* Tensors of every dtype can be moved. Floats, complex numbers, integers and bool can be
  reduced, except that bool supports only min, max and product (and, or, and), and
  complex numbers support only sum, average and product. Sums and products of integers
  wrap as their dtype does; averages of integers are summed in 64 bits.
* ``out`` receives the result. It must be contiguous and have the result's shape, dtype
  and device. With None the result is a new tensor.
* Wrong arguments raise ``UsageError``. A failure raises ``CollectiveError`` on every
  rank, from the call or from ``wait()``.
"""

import os
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor

from ronde.collectives.arithmetic import (
    HALVES,
    as_bytes,
    decode,
    dense,
    encode,
    flat,
    put_back,
    require_reducible,
    scale_,
)
from ronde.collectives.engine import (
    CPU,
    MESSAGE_BYTES,
    Engine,
    Plan,
    ReduceOp,
    Reduction,
    Work,
)
from ronde.collectives.shapes import CallLayout, LayoutSummary, require_out_rows, rows
from ronde.errors import IN_CHILD, CollectiveError, UsageError

# Takes a collective, the bytes of a tensor, None if they may differ between ranks, and
# the type of its device. Returns the name of an engine, the same on every rank.
Choose = Callable[[str, int | None, str], str]
# Takes the name of an engine and one that is unique to the communicator.
Connect = Callable[[str, str], Engine]
SMALL_BYTES, MEDIUM_BYTES = SIZE_LIMITS = 4 << 10, 4 << 20
"""Upper limits of the size classes; each class may use another engine."""
_Key = tuple[Engine, str, torch.dtype, bool | str, ReduceOp, float, float]
_MAX_KNOWN = 1024


class Routes:
    """The engines of a communicator, by kind of call.

    A call on one engine does not wait for calls on another engine. An engine is
    connected by the first call that needs it, which is the same call on all ranks.
    ``first`` also serves messages and calls without a tensor. ``nccl``, if given, is
    already connected and sends messages with CUDA tensors.
    """

    def __init__(
        self,
        first: Engine,
        choose: Choose | None = None,
        connect: Connect | None = None,
        nccl: Engine | None = None,
        name: str = "0",
    ) -> None:
        self.are_many = choose is not None
        self._choose = choose
        self._connect = connect
        self._first = first
        self._name = name
        self._num_clones = 0
        self._nccl = nccl
        self._engines = {first.name: first}
        if nccl is not None:
            self._engines["nccl"] = nccl
        self._known: dict[tuple[str, bool, int], Engine] = {}
        self._is_closed = False

    def of(self, call: str, tensor: Tensor, *, is_sized: bool = False) -> Engine:
        """Return a tensor's engine; ``is_sized`` if its size is equal on all ranks."""
        if self._choose is None:
            return self._first
        num_bytes = tensor.nbytes if is_sized else None
        size_class = -1 if num_bytes is None else bisect_left(SIZE_LIMITS, num_bytes)
        key = (call, tensor.is_cpu, size_class)
        engine = self._known.get(key)
        if engine is None:
            engine = self.engine(call, num_bytes, tensor.device.type)
            self._known[key] = engine
        return engine

    def of_pair(self, tensor: Tensor) -> Engine:
        """Return the engine for messages between two ranks."""
        return self._first if tensor.is_cpu else self._nccl or self._first

    def engine(self, call: str, num_bytes: int | None, device_type: str) -> Engine:
        """Return the engine for a call, and connect it if this is its first use."""
        if self._choose is None or self._connect is None:
            return self._first
        name = self._choose(call, num_bytes, device_type)
        if name not in self._engines:
            if self._is_closed:
                return self._first
            self._engines[name] = self._connect(name, self._name)
        return self._engines[name]

    def clone(self, first: Engine) -> "Routes":
        """Return routes for a duplicate of the communicator; collective."""
        self._num_clones += 1
        nccl = self._nccl.clone() if self._nccl else None
        name = f"{self._name}.{self._num_clones}"
        return Routes(first, self._choose, self._connect, nccl, name)

    def end(self) -> list[Engine]:
        """Refuse to connect further engines, and return those that are connected."""
        self._is_closed = True
        return list(self._engines.values())


class _ParentEngine:
    """Replacement for the parent's engine in a forked child; refuses collectives."""

    def __init__(self, name: str, kept: Routes) -> None:
        self.name = name
        self._kept = kept  # never freed: its resources belong to the parent

    def close(self) -> None:
        pass

    abort = close

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute of an engine
        raise CollectiveError(IN_CHILD)


_alive: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for communicator in list(_alive):
        communicator.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


@final
class Communicator:
    """A fixed group of ranks that exchange tensors through one or several engines.

    Attributes:
        engine: The engine's name; ``auto`` for several.
        algorithm: The name of the engine's algorithm, or empty.
        rank: Rank of this process in the group.
        size: Number of processes in the group.
        timeout_s: The longest time that a collective waits for another rank.
    """

    def __init__(self, engine: Engine, routes: Routes | None = None) -> None:
        """Take ownership of ``engine``, or of all engines of ``routes``."""
        self.engine = "auto" if routes and routes.are_many else engine.name
        self.algorithm = engine.algorithm
        self.rank, self.size = engine.rank, engine.size
        self.timeout_s = engine.timeout_s
        self._engine = engine
        self._routes = routes or Routes(engine)
        self._only = None if self._routes.are_many else engine
        self._known: dict[_Key, Reduction] = {}
        if self.size > 1:
            _alive.add(self)

    def leave_to_parent(self) -> None:
        """Make all later calls fail in a forked child, without closing anything."""
        engine = cast("Engine", _ParentEngine(self._engine.name, self._routes))
        self._engine = self._only = engine
        self._routes = Routes(engine)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        source: Tensor | None = None,
    ) -> Work[Tensor]:
        """Reduce ``tensor`` over all ranks, in place.

        Args:
            tensor: Any shape, equal on all ranks; the work's result.
            op: AVERAGE divides the sum by ``size``; integers truncate toward zero.
            prescale: Factor of each rank's input; equal on all ranks. Integers are
                multiplied in float64 and truncated.
            postscale: Factor of the result, under the same rules.
            source: The input, if not ``tensor``. It has ``tensor``'s shape, dtype and
                device, shares no memory with it, and is not changed.
        """
        engine = self._only or self._routes.of("all_reduce", tensor, is_sized=True)
        device = tensor.is_cpu or tensor.device.type
        key = (engine, "all_reduce", tensor.dtype, device, op, prescale, postscale)
        reduction = self._known.get(key) or self._plan(key, tensor)
        if reduction.scales and _is_vector(tensor):
            sent = tensor if source is None else _vector(source)
            return engine.all_reduce(sent, tensor, reduction).with_result(tensor)
        if not tensor.numel():
            engine.require_open()
            return Work(tensor)
        if reduction.scales:
            target = flat(dense(tensor))
            sent = target if source is None else _vector(source)
            work = engine.all_reduce(sent, target, reduction)
            return work.with_finish(partial(put_back, target, tensor))
        values = tensor.detach()
        if source is not None:
            values.copy_(source)
        if reduction.is_encoded and values.dtype in HALVES:
            values = values.to(torch.float32)  # rounded only once
        scale_(values, prescale)
        encoded = encode(values, op) if reduction.is_encoded else dense(values)
        vector = flat(encoded)
        work = engine.all_reduce(vector, vector, reduction)
        left = ReduceOp.SUM if reduction.op is ReduceOp.AVERAGE else op

        def finish() -> Tensor:
            result = decode(encoded, values.dtype, left, self.size, postscale)
            return put_back(result, tensor)

        return work.with_finish(finish)

    def all_gather(
        self,
        tensor: Tensor,
        *,
        out: Tensor | None = None,
        counts: list[int] | None = None,
    ) -> Work[Tensor]:
        """Concatenate every rank's ``tensor`` along dimension 0, in rank order.

        Args:
            tensor: At least one dimension. Dimension 0 may differ between ranks and may
                be 0.
            out: May contain ``tensor`` as this rank's rows.
            counts: A list to which every rank's number of rows is appended.
        """
        engine = self._only or self._routes.of("all_gather", tensor)
        try:
            _require_device(tensor, engine)
            if out is not None:
                _require_out(out, tensor)
        except UsageError:
            engine.refuse(CallLayout("all_gather", tensor.dtype, is_refused=True))
            raise
        data, results = tensor, list[Tensor]()
        if out is not None and tensor.ndim:
            data = _unaliased(tensor, out, self.rank * tensor.shape[0])

        def allocate(layouts: Sequence[LayoutSummary]) -> Tensor:
            num_rows = sum([each.num_rows for each in layouts])
            if counts is not None:
                counts.extend(each.num_rows for each in layouts)
            require_out_rows("all_gather", layouts, self.rank, [num_rows] * self.size)
            results.append(_result(tensor, num_rows, out))
            return as_bytes(results[0])

        layout = CallLayout.of("all_gather", tensor, out)
        sent = as_bytes(data if _is_vector(data) else dense(data))
        work = engine.gather_rows(layout, sent, _row_bytes(tensor), allocate)
        return work.with_finish(results.pop)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Tensor | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work[Tensor]:
        """Reduce over all ranks and keep this rank's rows of dimension 0.

        Args:
            tensor: At least one dimension, equal shape on all ranks. It is not changed.
            op: As in ``all_reduce``, like ``prescale`` and ``postscale``.
            out: May be this rank's rows of ``tensor``.
            splits: Rows for each rank, equal on all ranks. None splits evenly; the
                first ranks get the extra rows. Rows past their sum are ignored.
        """
        engine = self._only or self._routes.of("reduce_scatter", tensor, is_sized=True)
        device = tensor.is_cpu or tensor.device.type
        key = (engine, "reduce_scatter", tensor.dtype, device, op, prescale, postscale)
        reduction = self._known.get(key) or self._plan(key, tensor)
        _require_dimensions(tensor)
        num_rows = rows(tensor.shape[0], self.size)
        if splits is not None:
            num_rows = _require_splits(tensor, splits, self.size)
            tensor = tensor[: sum(num_rows)]
        if out is not None:
            _require_out(out, tensor, num_rows[self.rank])
        result = _result(tensor, num_rows[self.rank], out)
        if not tensor.numel():
            engine.require_open()
            return Work(result)
        if reduction.scales:
            data = _unaliased(tensor, out, sum(num_rows[: self.rank]))
            per_row = tensor.shape[1:].numel()
            counts = [count * per_row for count in num_rows]
            source, target = flat(dense(data)), flat(result.detach())
            work = engine.reduce_scatter(source, target, counts, reduction)
            return work.with_result(result)
        values = tensor.detach()
        if reduction.is_encoded and values.dtype in HALVES:
            values = values.to(torch.float32)
        if prescale != 1.0:
            values = values.clone()
            scale_(values, prescale)
        encoded = encode(values, op) if reduction.is_encoded else dense(values)
        rest = encoded.shape[1:]
        reduced = encoded.new_empty((num_rows[self.rank], *rest))
        counts = [count * rest.numel() for count in num_rows]
        work = engine.reduce_scatter(flat(encoded), flat(reduced), counts, reduction)
        left = ReduceOp.SUM if reduction.op is ReduceOp.AVERAGE else op

        def finish() -> Tensor:
            kept = decode(reduced, values.dtype, left, self.size, postscale)
            result.detach().copy_(kept)
            return result

        return work.with_finish(finish)

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor into ``tensor``, of equal shape, on every rank."""
        if not 0 <= root < self.size:
            raise UsageError(f"root must be in 0..{self.size - 1}, got {root}.")
        engine = self._only or self._routes.of("broadcast", tensor, is_sized=True)
        _require_device(tensor, engine)
        if not tensor.numel():
            engine.require_open()
            return Work(tensor)
        values = flat(dense(tensor))
        work = engine.broadcast(values, root)
        if self.rank == root:
            return work.with_result(tensor)
        return work.with_finish(partial(put_back, values, tensor))

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Send consecutive rows of dimension 0 to each rank, and receive from each.

        Args:
            tensor: At least one dimension; later dimensions equal on all ranks.
            splits: Rows for each rank; None splits evenly. Excess rows are ignored.
            out: Must not share memory with ``tensor``.

        Returns:
            Work with the received rows in rank order, and the number of rows from each
            rank.
        """
        call = "all_to_all"
        engine = self._routes.of(call, tensor)
        try:
            _require_device(tensor, engine)
            sent = _require_splits(tensor, splits, self.size)
            if out is not None:
                _require_out(out, tensor)
        except UsageError:
            engine.refuse(CallLayout(call, tensor.dtype, is_refused=True))
            raise
        results: list[tuple[Tensor, list[int]]] = []

        def allocate(layouts: Sequence[LayoutSummary], plan: Plan) -> Tensor:
            received = [sum(column) for column in zip(*plan, strict=True)]
            require_out_rows(call, layouts, self.rank, received)
            result = _result(tensor, received[self.rank], out)
            results.append((result, [row[self.rank] for row in plan]))
            return as_bytes(result)

        layout = CallLayout.of(call, tensor, out)
        data = as_bytes(dense(_unaliased(tensor[: sum(sent)], out)))
        work = engine.exchange_rows(layout, data, sent, _row_bytes(tensor), allocate)
        return work.with_finish(results.pop)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send ``tensor`` to one rank, which must call ``recv``."""
        engine = self._engine_to("to", to, tensor)
        if not tensor.numel():
            return Work(None)
        return engine.send(flat(dense(tensor)), to, tag).with_result(None)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive a message of ``tensor``'s shape and dtype from ``source`` into it."""
        engine = self._engine_to("source", source, tensor)
        if not tensor.numel():
            return Work(tensor)
        values = flat(dense(tensor))
        work = engine.recv(values, source, tag)
        return work.with_finish(partial(put_back, values, tensor))

    def find_sender(self, tensor: Tensor, tag: int = 0) -> int | None:
        """Return a rank that has sent an unreceived message with this tag, or None.

        ``tensor`` selects the engine. Only ``shared_memory`` supports this.
        """
        return self._routes.of_pair(tensor).find_sender(tag)

    def barrier(self) -> Work[None]:
        """Return work that completes once every rank has called ``barrier``."""
        return self._engine.barrier().with_result(None)

    def allocate(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        is_populated: bool = True,
    ) -> Tensor:
        """Allocate zeros in memory where in-place calls are fastest.

        Collective; all ranks pass equal arguments. The tensor has shape ``(numel,)``,
        is aligned to 64 bytes, and outlives ``close()`` and ``torch.inference_mode()``.
        Without ``is_populated``, pages are allocated on first use, and the available
        memory is not checked.

        Raises:
            CollectiveError: There is not enough memory; raised on every rank.
        """
        engine = self._engine
        if is_populated:
            engine = self.reducing_engine(numel * dtype.itemsize, device)
        return engine.allocate(numel, dtype, device, is_populated=is_populated)

    def reducing_engine(self, num_bytes: int, device: torch.device = CPU) -> Engine:
        """Return the engine that all_reduce uses for a size; collective."""
        return self._routes.engine("all_reduce", num_bytes, device.type)

    @property
    def has_shared_memory(self) -> bool:
        """True if all ranks map the memory that ``allocate`` returns."""
        return self._engine.name == "shared_memory"

    def exchange(self, message: bytes) -> list[bytes]:
        """Return all ranks' messages of at most 512 bytes; block until they arrive."""
        if len(message) > MESSAGE_BYTES:
            raise UsageError(
                f"message must have at most {MESSAGE_BYTES} bytes, got {len(message)}. "
                "Use all_gather for longer messages."
            )
        return self._engine.exchange(message)

    def duplicate(self) -> "Communicator":
        """Return a new communicator of these ranks, like MPI_Comm_dup; collective."""
        engine = self._engine.clone()
        return Communicator(engine, self._routes.clone(engine))

    def abort(self) -> None:
        """Close at once; calls in progress fail on all ranks. Not collective."""
        for engine in self._routes.end():
            engine.abort()

    def close(self) -> None:
        """Free threads, sockets and memory. Not collective; may be repeated."""
        for engine in self._routes.end():
            engine.close()

    def _plan(self, key: _Key, tensor: Tensor) -> Reduction:
        engine, call, dtype, _, op, prescale, postscale = key
        _require_device(tensor, engine)
        require_reducible(dtype, op, prescale, postscale)
        reduction = engine.native(call, tensor, op)
        if reduction is None:
            left = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
            reduction = Reduction(left, is_encoded=True)
        elif reduction.scales:
            reduction = replace(reduction, prescale=prescale, postscale=postscale)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = reduction
        return reduction

    def _engine_to(self, name: str, peer: int, tensor: Tensor) -> Engine:
        if not 0 <= peer < self.size or peer == self.rank:
            raise UsageError(
                f"{name} must be another rank in 0..{self.size - 1}, got {peer} on "
                f"rank {self.rank}."
            )
        engine = self._routes.of_pair(tensor)
        _require_device(tensor, engine)
        engine.require_open()
        return engine


def _is_vector(tensor: Tensor) -> bool:
    """Return True for a non-empty tensor that an engine can use without conversion."""
    return (
        tensor.dim() == 1
        and tensor.stride(0) == 1
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def _vector(tensor: Tensor) -> Tensor:
    return tensor if _is_vector(tensor) else flat(dense(tensor))


def _result(tensor: Tensor, num_rows: int, out: Tensor | None) -> Tensor:
    return tensor.new_empty((num_rows, *tensor.shape[1:])) if out is None else out


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _require_device(tensor: Tensor, engine: Engine) -> None:
    if ("cpu" if tensor.is_cpu else tensor.device.type) not in engine.devices:
        raise UsageError(
            f"device must be {' or '.join(sorted(engine.devices))} for the "
            f"{engine.name} engine, got {tensor.device}. Copy the tensor to the CPU, "
            "or use the auto or nccl engine."
        )


def _require_dimensions(tensor: Tensor) -> None:
    if tensor.ndim == 0:
        raise UsageError(
            "tensor must have at least one dimension, got a scalar. "
            "Use tensor.reshape(1)."
        )


def _require_splits(
    tensor: Tensor, splits: Sequence[int] | None, size: int
) -> list[int]:
    _require_dimensions(tensor)
    num_rows = tensor.shape[0]
    if splits is None:
        if num_rows % size:
            raise UsageError(
                f"dimension 0 must be divisible by the number of ranks, {size}, if "
                f"splits is None, got {num_rows}. Pass splits for uneven parts."
            )
        return [num_rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size:
        raise UsageError(
            f"splits must have {size} entries, one per rank, got {counts}."
        )
    if min(counts) < 0:
        raise UsageError(f"splits must not be negative, got {counts}.")
    if sum(counts) > num_rows:
        raise UsageError(
            f"splits must add up to at most {num_rows}, the size of dimension 0, got "
            f"{' + '.join(map(str, counts))} = {sum(counts)}."
        )
    return counts


def _require_out(out: Tensor, like: Tensor, num_rows: int | None = None) -> None:
    """Raise UsageError if ``out`` has the wrong shape, dtype, device or strides."""
    rest = tuple(like.shape[1:])
    fits = (
        out.dtype is like.dtype
        and out.device == like.device
        and out.ndim == max(like.ndim, 1)
        and tuple(out.shape[1:]) == rest
        and (num_rows is None or out.shape[0] == num_rows)
    )
    if not fits:
        first = "rows" if num_rows is None else str(num_rows)
        shape = ", ".join([first, *map(str, rest)])
        raise UsageError(
            f"out must be a {like.dtype} tensor on {like.device} with shape [{shape}], "
            f"got {out.dtype} on {out.device} with shape {list(out.shape)}. Omit out "
            "to get a new tensor."
        )
    if not out.is_contiguous():
        raise UsageError(
            f"out must be contiguous, got shape {list(out.shape)} with strides "
            f"{list(out.stride())}. Pass out.contiguous() and copy the result back."
        )


def _unaliased(tensor: Tensor, out: Tensor | None, at_row: int | None = None) -> Tensor:
    """Return ``tensor``, or a copy if writing ``out`` would overwrite it."""
    if out is None or not tensor.numel() or not out.numel():
        return tensor
    if tensor.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return tensor
    if at_row is not None and tensor.is_contiguous():
        row_bytes = out[0].numel() * out.element_size()
        if tensor.data_ptr() == out.data_ptr() + at_row * row_bytes:
            return tensor
    is_apart = _end(tensor) <= out.data_ptr() or tensor.data_ptr() >= _end(out)
    return tensor if is_apart else tensor.detach().clone()


def _end(tensor: Tensor) -> int:
    reach = sum(
        (length - 1) * stride
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()
