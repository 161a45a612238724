"""Horovod's own class of optimizer, for programs that derive from it.

Frameworks take it apart: they import ``_DistributedOptimizer``, override its hook or
mix its methods into a class made from the wrapped optimizer's. ``DistributedOptimizer``
does not use it.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ronde.data_parallel import Compression, Compressor
from ronde.errors import UsageError
from ronde.torch.completion import synchronize
from ronde.torch.naming import name_parameters
from ronde.torch.operators import Average
from ronde.torch.reductions import allreduce_async_
from ronde.torch.session import size


class _DistributedOptimizer(torch.optim.Optimizer):  # pyright: ignore[reportUnusedClass]
    """Reduces each gradient by its name from a hook, and waits for all in ``step()``.

    To be mixed with the class of the wrapped optimizer, whose ``param_groups`` it
    takes::

        cls = type(name, (type(optimizer),), dict(_DistributedOptimizer.__dict__))
        cls(optimizer.param_groups, model.named_parameters())

    Gradients are complete after ``synchronize()`` or ``step()``, not before.
    """

    def __init__(
        self,
        params: Any,  # noqa: ANN401  the wrapped optimizer's
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
    ) -> None:
        # Of the class that this is mixed into, which knows its own defaults.
        super(self.__class__, self).__init__(params)  # pyright: ignore[reportCallIssue]
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        named = name_parameters(self, named_parameters)
        self._parameter_names = {parameter: name for name, parameter in named}
        self._handles: dict[Tensor, tuple[int | None, Any]] = {}
        self._num_passes = dict.fromkeys(self._parameter_names, 0)
        self._should_synchronize = True
        if size() > 1:
            self._register_hooks()

    def _register_hooks(self) -> None:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(parameter))
            for parameter in self._parameter_names
            if parameter.requires_grad
        ]

    def _make_hook(self, p: Tensor) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if self._handles.get(p, (None,))[0] is not None:
                raise UsageError(
                    "Gradients were computed more than backward_passes_per_step times "
                    "before call to step(). Increase backward_passes_per_step to "
                    "accumulate gradients locally."
                )
            self._num_passes[p] += 1
            if self._num_passes[p] >= self.backward_passes_per_step:
                self._handles[p] = self._allreduce_grad_async(p)

        return hook

    def _allreduce_grad_async(self, p: Tensor) -> tuple[int, Any]:
        """Start to reduce a gradient; return the handle, and what decompresses it."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        wire, context = self._compression.compress(p.grad)
        name = self._parameter_names[p]
        return allreduce_async_(wire, name=name, op=self.op), context

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those not there count as zeros."""
        for parameter in self._parameter_names if size() > 1 else ():
            # An overridden hook may have put it off.
            is_started = self._handles.get(parameter, (None,))[0] is not None
            if parameter.requires_grad and not is_started:
                self._handles[parameter] = self._allreduce_grad_async(parameter)
        for parameter, (handle, context) in self._handles.items():
            if handle is None:
                continue
            result = self._compression.decompress(synchronize(handle), context)
            if result is not parameter.grad and parameter.grad is not None:
                parameter.grad.copy_(result)
        self._handles.clear()
        self._num_passes = dict.fromkeys(self._parameter_names, 0)

    @contextmanager
    def skip_synchronize(self) -> Generator[None]:
        """Let ``step()`` take the gradients as they are, after ``synchronize()``."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on gradients that are reduced over all ranks."""
        if self._should_synchronize:
            self.synchronize()
        return super(self.__class__, self).step(closure)
