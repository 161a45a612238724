"""Engines of other projects behind ``InferenceEngine``, by name, and model folders."""

from ronde.serve.engines.loading import (
    ModelFacts,
    load_engine,
    read_model,
    require_engine,
    require_tp,
)

__all__ = ["ModelFacts", "load_engine", "read_model", "require_engine", "require_tp"]
