"""Serve a model on several ranks: all take the same steps for the same requests."""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ronde.serve.engine import Engine, StepEngine, StepRow
    from ronde.serve.manager import BatchManager, Response
    from ronde.serve.policy import POLICIES, Capacity
    from ronde.serve.requests import Request, Token

__all__ = [
    "POLICIES",
    "BatchManager",
    "Capacity",
    "Engine",
    "Request",
    "Response",
    "StepEngine",
    "StepRow",
    "Token",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "engine": "Engine StepEngine StepRow",
        "manager": "BatchManager Response",
        "policy": "POLICIES Capacity",
        "requests": "Request Token",
    },
)
