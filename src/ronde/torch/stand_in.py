"""An object that stands in for an optimizer."""

from typing import Any

from torch.optim import Optimizer


class OptimizerProxy:
    """Is the wrapped optimizer but for what a subclass defines.

    Not a subclass made at run time: what is not defined is the wrapped optimizer's, to
    read, to set (GradScaler sets ``grad_scale``) and to delete.

    Attributes:
        wrapped: The optimizer.
    """

    wrapped: Optimizer

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The wrapped optimizer's class, so that ``isinstance`` tells the truth."""
        return type(self.wrapped)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the wrapped one's
        if name == "wrapped":  # not there yet: unpickling, a failed __init__
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        own = type(self)
        is_own = name == "wrapped" or name in own.__annotations__
        if is_own or name in own.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"
