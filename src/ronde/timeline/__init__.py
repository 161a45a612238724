"""Recording of all ranks' collectives, and the merged trace."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "alignment": (
            "ClockMap ClockReading align bound_offset find_arrivals waited_ns"
        ),
        "chrome": "write_trace",
        "events": "Activity ClockBound Recorded",
        "gathering": "CHUNK_BYTES Gathering GatheringOptions",
        "part": (
            "Encoder NUM_SEGMENTS PartFiles PartHeader Track encode_line read_parts"
        ),
        "recording": "LiveFile MAX_WAITING ThreadedRecorder",
    },
)
