"""Diagnosis of a job that hangs: the observers on its hosts, and the verdict."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "asking": "InspectedJob choose_job inspect_job",
        "flight": "explain_dumps read_dumps",
        "inspection": "KernelLine",
        "observer": "find_kernel_lines",
        "stacks": "read_by_signal",
        "verdict": "Fault Verdict Wait explain_hang",
    },
)
