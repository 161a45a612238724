"""Reader of NCCL's debug log: NCCL's choices, and faults."""

from ronde.topology.nccl_log.lint import lint_nccl_log
from ronde.topology.nccl_log.log import NcclJob, NcclLog, read_nccl_log
from ronde.topology.nccl_log.messages import is_nccl_log

__all__ = ["NcclJob", "NcclLog", "is_nccl_log", "lint_nccl_log", "read_nccl_log"]
