"""Timelines of all ranks, read: merged and summed up."""

from ronde.trace.reading import read_part_files, read_trace
from ronde.trace.summary import TraceSummary, summarize

__all__ = ["TraceSummary", "read_part_files", "read_trace", "summarize"]
