"""Readers and summaries of timelines."""

from ronde.lazy_exports import lazy_exports
from ronde.trace.reading import read_part_files, read_trace
from ronde.trace.summary import TraceSummary, summarize

__all__ = ["TraceSummary", "read_part_files", "read_trace", "summarize"]

__getattr__ = lazy_exports(
    __name__,
    {
        "reading": "read_part_files trace_of",
        "summary": "covered",
    },
)
