"""Training that goes on when ranks fail, come and go: ``hvd.elastic``."""

from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.state import ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
