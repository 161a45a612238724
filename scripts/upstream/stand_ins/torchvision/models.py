"""The one model that Horovod's examples take from torchvision."""

from torch import nn

from ronde.bench.training.models import FACTORIES


def resnet50() -> nn.Module:
    """Make ResNet-50 for 1,000 classes of images of 224 x 224."""
    return FACTORIES["resnet50"](1000)
