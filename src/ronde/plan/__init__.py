"""Predictions of training speed from measurements of a few ranks."""

from ronde.plan.posterior import Forecast, Posterior, infer
from ronde.plan.priors import Prior, Priors, load_priors
from ronde.plan.setup import (
    ArrivingGradient,
    Cluster,
    Exchange,
    LinkFacts,
    Overlap,
    PhaseTimes,
    Point,
    Program,
    Setup,
    Size,
)
from ronde.plan.step import PARTS, Hypothesis, StepModel, mean_of_largest
from ronde.plan.validation import (
    SIZES_BYTES,
    MeasuredSteps,
    Predicted,
    StepComparison,
    StepRequest,
    judge,
    layout_of,
    predict_steps,
    slower_rate,
    summarize,
)
from ronde.plan.walk import Walk, walk

__all__ = [
    "PARTS",
    "SIZES_BYTES",
    "ArrivingGradient",
    "Cluster",
    "Exchange",
    "Forecast",
    "Hypothesis",
    "LinkFacts",
    "MeasuredSteps",
    "Overlap",
    "PhaseTimes",
    "Point",
    "Posterior",
    "Predicted",
    "Prior",
    "Priors",
    "Program",
    "Setup",
    "Size",
    "StepComparison",
    "StepModel",
    "StepRequest",
    "Walk",
    "infer",
    "judge",
    "layout_of",
    "load_priors",
    "mean_of_largest",
    "predict_steps",
    "slower_rate",
    "summarize",
    "walk",
]
