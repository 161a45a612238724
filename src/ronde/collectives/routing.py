"""One communicator on several engines: each call goes to the one that suits it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ronde.collectives.choice import size_class
from ronde.collectives.communicator import Communicator, ReduceOp, Work

Choose = Callable[[str, int | None, str], str]
"""Names the engine for a collective, the bytes of the tensor where all ranks have as
many, and the type of its device. It must answer the same on every rank."""
Connect = Callable[[str, str], Communicator]
"""Connects an engine by name; collective. The second word tells communicators of the
same ranks apart."""
_CPU = torch.device("cpu")


class RoutedCommunicator(Communicator):
    """A communicator that has an engine of its own for every kind of call.

    Calls on one engine do not wait for calls on another; ``wait()`` does. An engine is
    connected when it is first needed, which is in the same call on all ranks.

    Attributes:
        rank: This process in the group.
        size: Number of processes in the group.
    """

    engine = "auto"

    def __init__(
        self,
        first: Communicator,
        choose: Choose,
        connect: Connect,
        *,
        name: str = "0",
        others: Mapping[str, Communicator] = MappingProxyType({}),
    ) -> None:
        """Route between engines.

        Args:
            first: An engine that is connected; it has the calls without a tensor.
            choose: Names the engine for a call.
            connect: Connects an engine.
            name: Tells communicators of the same ranks apart.
            others: Further engines that are connected: messages between two ranks
                may need them.
        """
        self.rank, self.size = first.rank, first.size
        self._first = first
        self._choose = choose
        self._connect = connect
        self._name = name
        self._num_duplicates = 0
        self._others = tuple(others)
        self._engines = {first.engine: first, **others}
        self._routes: dict[tuple[str, bool, int], Communicator] = {}
        self._is_closed = False

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce in place: see ``Communicator``."""
        engine = self._of_size("all_reduce", tensor)
        return engine.all_reduce(tensor, op, prescale=prescale, postscale=postscale)

    def all_reduce_from(
        self,
        source: Tensor,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work[Tensor]:
        """Reduce from one tensor into another: see ``Communicator``."""
        return self._of_size("all_reduce", tensor).all_reduce_from(
            source, tensor, op, prescale=prescale, postscale=postscale
        )

    def all_gather(self, tensor: Tensor, *, out: Tensor | None = None) -> Work[Tensor]:
        """Concatenate along dimension 0: see ``Communicator``."""
        return self._of_any_size("all_gather", tensor).all_gather(tensor, out=out)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        prescale: float = 1.0,
        postscale: float = 1.0,
        out: Tensor | None = None,
    ) -> Work[Tensor]:
        """Reduce and keep this rank's rows: see ``Communicator``."""
        engine = self._of_size("reduce_scatter", tensor)
        return engine.reduce_scatter(
            tensor, op, prescale=prescale, postscale=postscale, out=out
        )

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """Copy ``root``'s tensor in place: see ``Communicator``."""
        return self._of_size("broadcast", tensor).broadcast(tensor, root)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
    ) -> Work[tuple[Tensor, list[int]]]:
        """Exchange rows: see ``Communicator``."""
        engine = self._of_any_size("all_to_all", tensor)
        return engine.all_to_all(tensor, splits, out=out)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Work[None]:
        """Send to one rank: see ``Communicator``."""
        return self._of_pair(tensor).send(tensor, to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> Work[Tensor]:
        """Receive from one rank: see ``Communicator``."""
        return self._of_pair(tensor).recv(tensor, source, tag)

    def barrier(self) -> Work[None]:
        """Complete when all have called: see ``Communicator``."""
        return self._first.barrier()

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> Tensor:
        """Allocate where an all_reduce is fastest: see ``Communicator``."""
        chosen = self._choose("all_reduce", numel * dtype.itemsize, device.type)
        return self._engine(chosen).allocate(numel, dtype, device)

    def duplicate(self) -> "RoutedCommunicator":
        """Make a communicator of the same ranks: see ``Communicator``."""
        first = self._first.duplicate()
        self._num_duplicates += 1
        return RoutedCommunicator(
            first,
            self._choose,
            self._connect,
            name=f"{self._name}.{self._num_duplicates}",
            others={name: self._engines[name].duplicate() for name in self._others},
        )

    def close(self) -> None:
        """Close all engines; calls may be repeated."""
        self._is_closed = True
        for engine in self._engines.values():
            engine.close()

    def abort(self) -> None:
        """Close all engines and tell the other ranks: see ``Communicator``."""
        self._is_closed = True
        for engine in self._engines.values():
            engine.abort()

    def _of_size(self, name: str, tensor: Tensor) -> Communicator:
        """Return the engine for a tensor that is as large on all ranks."""
        num_bytes = tensor.numel() * tensor.element_size()
        return self._route(name, tensor, num_bytes)

    def _of_any_size(self, name: str, tensor: Tensor) -> Communicator:
        """Return the engine where sizes may differ from rank to rank."""
        return self._route(name, tensor, None)

    def _of_pair(self, tensor: Tensor) -> Communicator:
        """Return the engine for two ranks; the others could not help to connect one."""
        chosen = self._choose("send", None, tensor.device.type)
        return self._engines.get(chosen, self._first)

    def _route(self, name: str, tensor: Tensor, num_bytes: int | None) -> Communicator:
        route = (
            name,
            tensor.is_cpu,
            -1 if num_bytes is None else size_class(num_bytes),
        )
        engine = self._routes.get(route)
        if engine is None:
            chosen = self._choose(name, num_bytes, tensor.device.type)
            engine = self._routes[route] = self._engine(chosen)
        return engine

    def _engine(self, name: str) -> Communicator:
        """Return an engine, connected; where all is closed, one that says so."""
        if name not in self._engines:
            if self._is_closed:
                return self._first
            self._engines[name] = self._connect(name, self._name)
        return self._engines[name]
