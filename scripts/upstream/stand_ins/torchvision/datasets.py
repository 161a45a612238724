"""Small data sets in place of those that Horovod's examples would download."""

import torch
from torch.utils.data import TensorDataset


def _make(size: int, shape: tuple[int, ...], num_classes: int) -> TensorDataset:
    """Return noisy pictures, one of ``num_classes`` in each; always the same."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randn(num_classes, *shape, generator=generator)
    labels = torch.arange(size) % num_classes
    noise = torch.randn(size, *shape, generator=generator)
    return TensorDataset(classes[labels] + noise, labels)


def MNIST(root: str, **options: object) -> TensorDataset:  # noqa: N802  torchvision's
    """Return 2,048 pictures in place of 60,000."""
    del root, options
    return _make(2048, (1, 28, 28), 10)


def ImageFolder(root: str, **options: object) -> TensorDataset:  # noqa: N802
    """Return 8 pictures of the size of ImageNet's."""
    del root, options
    return _make(8, (3, 224, 224), 4)
