"""Serve a model on several ranks: all take the same steps for the same requests."""

from typing import TYPE_CHECKING

from ronde.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ronde.serve.engine import InferenceEngine, StepEngine, StepRow
    from ronde.serve.engines import (
        ServedModel,
        load_engine,
        read_model,
        require_engine,
        require_tp,
    )
    from ronde.serve.front import Flight, Front, FrontOptions, Health, RejectedError
    from ronde.serve.http import ApiServer, HttpOptions, make_app
    from ronde.serve.link import FrontLink
    from ronde.serve.load import (
        TEXT_FORM,
        CompletionServer,
        LoadOutcome,
        LoadRequest,
        Workload,
        find_server,
        median_figures,
        parse_lengths,
        run_load,
    )
    from ronde.serve.loop import OutOfStepError
    from ronde.serve.manager import BatchManager
    from ronde.serve.metrics import ServingMetrics
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
    from ronde.serve.supervision import ReplicaOptions, ReplicaRanks
    from ronde.serve.text import ModelText, TextStream

__all__ = [
    "POLICIES",
    "TEXT_FORM",
    "ApiServer",
    "BatchManager",
    "Capacity",
    "CompletionServer",
    "Flight",
    "Front",
    "FrontLink",
    "FrontOptions",
    "Health",
    "HttpOptions",
    "InferenceEngine",
    "InferenceRequest",
    "LoadOutcome",
    "LoadRequest",
    "ModelText",
    "OutOfStepError",
    "RejectedError",
    "ReplicaConfig",
    "ReplicaOptions",
    "ReplicaRanks",
    "Response",
    "ServedModel",
    "ServingMetrics",
    "Statistics",
    "StepEngine",
    "StepRow",
    "TextStream",
    "Token",
    "TokenCounts",
    "Workload",
    "choose_token",
    "find_server",
    "load_engine",
    "make_app",
    "median_figures",
    "parse_lengths",
    "read_model",
    "require_engine",
    "require_servable",
    "require_tp",
    "run_load",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "engines": "ServedModel load_engine read_model require_engine require_tp",
        "engine": "InferenceEngine StepEngine StepRow",
        "load": (
            "TEXT_FORM CompletionServer LoadOutcome LoadRequest Workload find_server "
            "median_figures parse_lengths run_load"
        ),
        "front": "Flight Front FrontOptions Health RejectedError",
        "http": "HttpOptions ApiServer make_app",
        "link": "FrontLink",
        "loop": "OutOfStepError",
        "manager": "BatchManager",
        "metrics": "ServingMetrics",
        "policy": "POLICIES Capacity TokenCounts",
        "protocol": "ReplicaConfig",
        "requests": "InferenceRequest Response Statistics Token require_servable",
        "sampling": "choose_token",
        "supervision": "ReplicaRanks ReplicaOptions",
        "text": "ModelText TextStream",
    },
)
