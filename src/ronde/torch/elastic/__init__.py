"""Training with ranks that may fail, leave and join: ``hvd.elastic``."""

from ronde.lazy_exports import lazy_exports
from ronde.torch.elastic.data import DataSource, ElasticLoader, Share
from ronde.torch.elastic.loop import Loop, Step
from ronde.torch.elastic.position import Position, derive_seed
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.shards import ElasticShards
from ronde.torch.elastic.state import ObjectState, State, TorchState, run
from ronde.torch.elastic.weights import GradientWeights, LearningRateScale

__all__ = [
    "DataSource",
    "ElasticLoader",
    "ElasticSampler",
    "ElasticShards",
    "GradientWeights",
    "LearningRateScale",
    "Loop",
    "ObjectState",
    "Position",
    "Share",
    "State",
    "Step",
    "TorchState",
    "derive_seed",
    "run",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "checkpoint": "Checkpoints",
        "copies": "find_keepers pack unpack",
        "position": "StepSampler order_of shard_batch",
        "state": (
            "HostUpdateResult HostsUpdatedInterrupt ModelStateHandler StateHandler "
            "get_handler_registry notification_manager run_fn set_handler_registry"
        ),
    },
)
