"""Layouts of sharded training and their costs: memory, bytes sent and idle time."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "buckets": (
            "ALIGNMENT_BYTES BucketLimits BucketPlan GradientSpec Slot "
            "candidate_limits plan_buckets"
        ),
        "layout": "AXES Layout RankLayout",
        "memory": "OptimizerName Precision RankMemory Sharding",
        "pipelines": "Pipeline ScheduleName cut_evenly",
        "traffic": "StepSizes step_traffic",
    },
)
