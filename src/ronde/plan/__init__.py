"""Predictions of training speed from measurements of a few ranks."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "walk": "Walk even_ready walk",
    },
)
