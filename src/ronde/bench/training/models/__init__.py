"""The models of the catalogue, in torch.nn alone."""

from ronde.bench.training.models.factories import FACTORIES, build

__all__ = ["FACTORIES", "build"]
