"""Engines of other projects behind ``InferenceEngine``, by name, and model folders."""

from ronde.serve.engines.loading import (
    ServedModel,
    load_engine,
    read_model,
    require_engine,
    require_tp,
)

__all__ = ["ServedModel", "load_engine", "read_model", "require_engine", "require_tp"]
