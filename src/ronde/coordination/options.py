"""How a coordinator works."""

from dataclasses import dataclass

from ronde.coordination.fusion_tuning import FusionTuningOptions


@dataclass(frozen=True, slots=True)
class CoordinationOptions:
    """Equal on all ranks, save where said otherwise.

    Attributes:
        fusion_threshold_bytes: Tensors are fused up to this; 0 fuses none.
        tuning: How to find a better one; None keeps it.
        gather_time_s: How long submissions that nobody waits for yet may gather before
            they are sent off together (Horovod's cycle time).
        cache_capacity: Number of responses remembered; 0 for none.
        is_group_alone: Do not fuse a group with anything else.
        stall_warning_s: Warn of what has waited for so long; 0 for never.
        stall_shutdown_s: End the job after so long; 0 for never.
    """

    fusion_threshold_bytes: int = 128 << 20
    tuning: FusionTuningOptions | None = None
    gather_time_s: float = 0.001
    cache_capacity: int = 1024
    is_group_alone: bool = False
    stall_warning_s: float = 60.0
    stall_shutdown_s: float = 0.0
