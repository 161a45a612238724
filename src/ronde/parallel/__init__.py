"""Layouts of sharded training, and what each costs in memory, bytes and idle time."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "layout": "AXES Layout",
        "memory": "OptimizerName Precision RankMemory Sharding",
        "pipelines": "Pipeline PipelineAction ScheduleName cut_evenly simulate",
        "traffic": "StepSizes step_traffic",
    },
)
