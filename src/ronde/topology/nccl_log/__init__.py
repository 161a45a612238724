"""NCCL's debug log, as values: what it chose, and where."""

from ronde.topology.nccl_log.log import Job, NcclLog
from ronde.topology.nccl_log.reader import read_nccl_log

__all__ = ["Job", "NcclLog", "read_nccl_log"]
