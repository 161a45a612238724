"""Training with ranks that may fail, leave and join: ``hvd.elastic``."""

from ronde.lazy_exports import lazy_exports
from ronde.session.elastic import (
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
    HostUpdateResult as HostUpdateResult,
    ObjectState,
    State,
    notification_manager as notification_manager,
    run,
    run_fn as run_fn,
)
from ronde.torch.elastic.data import DataSource, ElasticLoader, Share
from ronde.torch.elastic.loop import Loop, Step
from ronde.torch.elastic.position import Position, derive_seed
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.shards import ElasticShards
from ronde.torch.elastic.state import TorchState
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
            "ModelStateHandler StateHandler get_handler_registry set_handler_registry"
        ),
    },
)
