"""Views of a running job, from the observers on its hosts; the verdict on a hang."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "advice": "Advice find_advice find_headline",
        "asking": "InspectedJob ObservedJob choose_job inspect_workers observe_job",
        "collecting": "ProfileCollector collect_own_job",
        "flight": "explain_dumps read_dumps",
        "gpus": "GpuReader HangingReader",
        "host": "UsageReader",
        "inspection": "Inspection KernelLine StackFrame",
        "metrics": "open_metrics",
        "observer": "find_kernel_lines",
        "profiling": "LineReport ProfileReport ProfileShares ProfileTraits RankReport"
        " summarize_profile",
        "sampler": "Sampler add_samples",
        "samples": "HostSamples Profile SampleWindow",
        "send_queues": "SendQueue",
        "slow": "explain_slow",
        "stack_kinds": "StackKind StackReader",
        "stacks": "read_by_signal",
        "usage": "GpuUsage HostUsage NetworkCounters ProcessUsage",
        "verdict": "Fault Verdict Wait explain_hang find_evidence",
        "view": "WatchedHost WatchedJob JobWatcher WatchedRank Shares watch_job",
        "web": "WebPage publish",
    },
)
