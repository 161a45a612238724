"""A look into a job: the observers of its hosts, and the verdict on a hang."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "asking": "InspectedJob choose_job inspect_job",
        "flight": "explain_dumps read_dumps",
        "verdict": "Fault Verdict Wait explain_hang",
    },
)
