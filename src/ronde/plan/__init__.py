"""Predictions of training speed from measurements of a few ranks."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "validation": (
            "MeasuredSteps Measurement Predicted StepComparison judge layout_of "
            "predict_steps slower_rate summarize"
        ),
        "walk": "Walk even_ready walk",
    },
)
