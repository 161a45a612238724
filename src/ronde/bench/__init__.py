"""``ronde bench``: measurement of collectives and training steps."""

from ronde.lazy_exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "catalog": (
            "COLLECTIVES DTYPES OPS base_bytes in_elements largest_row premultiplier "
            "require_room shape_of traffic_matrix"
        ),
        "checking": "ReductionInputs TOLERANCE pieces_of random_bytes",
        "comparison": "Compared RowKey compare",
        "limits": (
            "buffer_bytes cache_bytes copy_gb_per_s measure_memory search_limit "
            "with_gpus_at"
        ),
        "link_costs": "fit_rows",
        "log_reading": "read_log",
        "log_state": "agrees infer_ranks infer_tests",
        "log_text": "read_text",
        "operations": "Buffers CallSpec",
        "options": "Engines Exit Options Shown Sweep TimingLoop UnsupportedError parse",
        "ranks": "Ranks",
        "results": (
            "Device Ending Half Heading IterationTimes Measured RankCount "
            "RankSource Row Run Side Totals from_record to_record"
        ),
        "sweeps": "RowBench SweepBench",
        "timing": "Clock Marks Watchdog combine",
        "training.catalogue": "CHARACTERS MODELS PORTABLE",
        "training.measurement": (
            "is_in_step measure measure_footprint split_by_differences time_block"
        ),
        "training.keras_models": "build_keras",
        "training.models": "PaddedShortcut Transformer build",
        "training.outcome": (
            "KIND GradientArrival Phase ReducedBuckets Setting StepTimes TrainOptions "
            "TrainingOutcome Variant record_values spread_of"
        ),
        "training.replica": "Stopwatch batches make_samples",
        "training.torch_replicas": (
            "ParameterServer TorchReplica loss_of measure_arrivals"
        ),
        "variables": "read_variables",
    },
)
