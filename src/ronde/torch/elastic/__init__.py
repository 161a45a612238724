"""Training that goes on when ranks fail, come and go: ``hvd.elastic``."""

from ronde.torch.elastic.objects import ObjectState, State
from ronde.torch.elastic.running import run
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
