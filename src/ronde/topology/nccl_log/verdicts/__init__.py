"""What looks wrong in NCCL's debug log."""

from ronde.topology.nccl_log.verdicts.judge import judge_nccl_log

__all__ = ["judge_nccl_log"]
