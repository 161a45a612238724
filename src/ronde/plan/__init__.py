"""Predictions of training speed from measurements of a few ranks."""

from ronde.lazy_exports import lazy_exports
from ronde.plan.walk import walk  # not lazy, as its module has the same name

__all__ = ["walk"]

__getattr__ = lazy_exports(
    __name__,
    {
        "posterior": "infer",
        "priors": "load_priors",
        "setup": (
            "ArrivingGradient Cluster Exchange LinkFacts Overlap PhaseTimes Point "
            "Program Setup Size"
        ),
        "step": "PARTS Hypothesis StepModel mean_of_largest",
        "validation": (
            "SIZES_BYTES MeasuredSteps Predicted StepComparison StepRequest judge "
            "layout_of predict_steps slower_rate"
        ),
    },
)
