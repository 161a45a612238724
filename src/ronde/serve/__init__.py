"""Serve a model on several ranks: all take the same steps for the same requests."""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ronde.serve.engine import InferenceEngine, StepEngine, StepRow
    from ronde.serve.loop import OutOfStepError
    from ronde.serve.manager import BatchManager
    from ronde.serve.policy import POLICIES, Capacity, TokenCounts
    from ronde.serve.protocol import ReplicaConfig
    from ronde.serve.requests import (
        InferenceRequest,
        Response,
        Statistics,
        Token,
        require_servable,
    )
    from ronde.serve.sampling import choose_token

__all__ = [
    "POLICIES",
    "BatchManager",
    "Capacity",
    "InferenceEngine",
    "InferenceRequest",
    "OutOfStepError",
    "ReplicaConfig",
    "Response",
    "Statistics",
    "StepEngine",
    "StepRow",
    "Token",
    "TokenCounts",
    "choose_token",
    "require_servable",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "engine": "InferenceEngine StepEngine StepRow",
        "loop": "OutOfStepError",
        "manager": "BatchManager",
        "policy": "POLICIES Capacity TokenCounts",
        "protocol": "ReplicaConfig",
        "requests": "InferenceRequest Response Statistics Token require_servable",
        "sampling": "choose_token",
    },
)
