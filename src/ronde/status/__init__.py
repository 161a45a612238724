"""The status of a rank, and the thread that reports it to the launcher."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "flight_recorder": "FlightRecorderSource",
        "reporter": "Part StatusReporter add_source progress",
        "steps": "StepMeter StepTime own_meter",
        "table": "JobInfo JobStatus WorkerInfo",
        "values": "PendingCollective RankStatus UNKNOWN decode_status encode_status",
    },
)
