"""Predictions of training speed from measurements of a few ranks."""

from ronde.plan.validation import (
    SIZES_BYTES,
    MeasuredSteps,
    Measurement,
    Predicted,
    StepComparison,
    judge,
    layout_of,
    predict_steps,
    slower_rate,
    summarize,
)
from ronde.plan.walk import Walk, even_ready, walk

__all__ = [
    "SIZES_BYTES",
    "MeasuredSteps",
    "Measurement",
    "Predicted",
    "StepComparison",
    "Walk",
    "even_ready",
    "judge",
    "layout_of",
    "predict_steps",
    "slower_rate",
    "summarize",
    "walk",
]
