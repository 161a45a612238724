"""Views of a running job, from the observers on its hosts; the verdict on a hang."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "asking": "InspectedJob choose_job inspect_job",
        "flight": "explain_dumps read_dumps",
        "inspection": "Inspection KernelLine StackFrame",
        "observer": "find_kernel_lines",
        "stacks": "read_by_signal",
        "samples": "Profile SampleWindow",
        "usage": "GpuUsage HostUsage Interface ProcessUsage",
        "view": "HostView JobView JobWatcher RankView Shares",
        "verdict": "Fault Verdict Wait explain_hang",
        "watching": "watch_job",
    },
)
