"""Which of several engines a call goes to."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from ronde.collectives.choice import size_class
from ronde.collectives.engine import Engine

Choose = Callable[[str, int | None, str], str]
"""Names the engine for a collective, the bytes of the tensor where all ranks have as
many, and the type of its device. It must answer the same on every rank."""
Connect = Callable[[str, str], Engine]
"""Connects an engine by name; collective. The second word tells communicators of the
same ranks apart."""


class Routes:
    """An engine for every kind of call; where there is one, that for all.

    Calls on one engine do not wait for calls on another; ``wait()`` does. An engine is
    connected when it is first needed, which is in the same call on all ranks.
    """

    def __init__(
        self,
        first: Engine,
        choose: Choose | None = None,
        connect: Connect | None = None,
        others: Mapping[str, Engine] = MappingProxyType({}),
        name: str = "0",
    ) -> None:
        """Route between engines.

        Args:
            first: An engine that is connected; it has the calls without a tensor.
            choose: Names the engine for a call; None where there is only the first.
            connect: Connects an engine, where there are several.
            others: Further engines that are connected: messages between two ranks may
                need them.
            name: Tells communicators of the same ranks apart.
        """
        self.are_many = choose is not None
        self._choose = choose
        self._connect = connect
        self._first = first
        self._name = name
        self._num_clones = 0
        self._others = tuple(others)
        self._engines = {first.name: first, **others}
        self._known: dict[tuple[str, bool, int], Engine] = {}
        self._is_closed = False

    def of_size(self, call: str, tensor: Tensor) -> Engine:
        """Return the engine for a tensor that is as large on all ranks."""
        if self._choose is None:
            return self._first
        return self._route(call, tensor, tensor.numel() * tensor.element_size())

    def of_any_size(self, call: str, tensor: Tensor) -> Engine:
        """Return the engine where sizes may differ from rank to rank."""
        return self._first if self._choose is None else self._route(call, tensor, None)

    def of_pair(self, tensor: Tensor) -> Engine:
        """Return the engine for two ranks; the others could not help to connect one."""
        if self._choose is None:
            return self._first
        chosen = self._choose("send", None, tensor.device.type)
        return self._engines.get(chosen, self._first)

    def engine(self, call: str, num_bytes: int | None, device_type: str) -> Engine:
        """Return an engine, connected; where all is closed, one that says so."""
        if self._choose is None or self._connect is None:
            return self._first
        name = self._choose(call, num_bytes, device_type)
        if name not in self._engines:
            if self._is_closed:
                return self._first
            self._engines[name] = self._connect(name, self._name)
        return self._engines[name]

    def clone(self, first: Engine) -> "Routes":
        """Return the same for another communicator of the same ranks; collective."""
        self._num_clones += 1
        return Routes(
            first,
            self._choose,
            self._connect,
            {name: self._engines[name].clone() for name in self._others},
            f"{self._name}.{self._num_clones}",
        )

    def end(self) -> list[Engine]:
        """Connect no more; return all engines, to be closed."""
        self._is_closed = True
        return list(self._engines.values())

    def _route(self, call: str, tensor: Tensor, num_bytes: int | None) -> Engine:
        bound = -1 if num_bytes is None else size_class(num_bytes)
        key = (call, tensor.is_cpu, bound)
        engine = self._known.get(key)
        if engine is None:
            engine = self.engine(call, num_bytes, tensor.device.type)
            self._known[key] = engine
        return engine
