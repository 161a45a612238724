"""What Horovod's variables say of autotuning, as options."""

from pathlib import Path

from ronde.coordination.fusion_tuning import FusionTuningOptions
from ronde.data_parallel import BucketTuningOptions
from ronde.errors import UsageError
from ronde.tuning import TuningLog, TuningOptions
from ronde.world.horovod_config import HorovodConfig


def tuning_options(knobs: HorovodConfig, rank: int) -> BucketTuningOptions | None:
    """Return how reducers are to find their bucket sizes; None if they are not to.

    Args:
        knobs: What the variables say, equal on all ranks but for the log.
        rank: Of this process; rank 0 alone writes the log, over what was there.

    Raises:
        UsageError: A number is out of range, or the log cannot be written.
    """
    if not knobs.is_autotuning:
        return None
    amount = TuningOptions(
        warmup_samples=knobs.autotune_warmup_samples,
        steps_per_sample=knobs.autotune_steps_per_sample,
        max_samples=knobs.autotune_max_samples,
    )
    log = None
    if knobs.autotune_log and rank == 0:
        try:
            log = TuningLog(Path(knobs.autotune_log))
        except OSError as error:
            raise UsageError(
                "HOROVOD_AUTOTUNE_LOG must be a file that can be written, got "
                f"{knobs.autotune_log}: {error.strerror}. Give another path."
            ) from error
    return BucketTuningOptions(amount, log)


def fusion_options(
    knobs: HorovodConfig, tuning: BucketTuningOptions | None
) -> FusionTuningOptions | None:
    """Return how coordinators are to find their fusion threshold, if they are to.

    Args:
        knobs: What the variables say; a threshold that is set stays.
        tuning: What ``tuning_options`` made of them.
    """
    if tuning is None or "FUSION_THRESHOLD" in knobs.explicit:
        return None
    return FusionTuningOptions(tuning.amount, tuning.log)
