"""A plain Horovod script: MNIST, or Fashion-MNIST, from local files; nothing of ronde.

Run it as ``ronde run -n 2 python horovod_mnist.py --data DIR``, or with Horovod itself
as ``horovodrun -np 2 python horovod_mnist.py --data DIR``. On Debian ``apt-get install
dataset-fashion-mnist`` puts the files into ``/usr/share/datasets/fashion-mnist``.
"""

import argparse
import gzip
from pathlib import Path

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithm of each class's probability."""
        maps = functional.relu(functional.max_pool2d(self.conv1(images), 2))
        maps = functional.relu(functional.max_pool2d(self.conv2(maps), 2))
        hidden = functional.relu(self.fc1(maps.flatten(1)))
        return functional.log_softmax(self.fc2(hidden), dim=1)


def read_dataset(directory: Path, name: str) -> TensorDataset:
    """Read the images and labels of ``train`` or ``t10k``."""
    content = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = next(directory.glob(f"{name}-{kind}-ubyte*"))
        packed = path.read_bytes()
        unpacked = gzip.decompress(packed) if path.suffix == ".gz" else packed
        content.append(np.frombuffer(unpacked, np.uint8, offset=header))
    pixels, labels = content
    images = torch.from_numpy(pixels.astype(np.float32)).reshape(-1, 1, 28, 28)
    return TensorDataset(images / 127.5 - 1, torch.from_numpy(labels.astype(np.int64)))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, epoch: int
) -> None:
    """Train for one epoch; rank 0 tells how it goes."""
    model.train()
    for batch, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch % 100 == 0 and hvd.rank() == 0:
            print(f"epoch {epoch} batch {batch}/{len(loader)} loss {loss.item():.4f}")


def metric_average(value: float, name: str) -> float:
    """Return the mean over all ranks."""
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> None:
    """Test on this rank's share; rank 0 tells the mean of all."""
    model.eval()
    loss, num_correct, num_tested = 0.0, 0, 0
    for images, labels in loader:
        output = model(images)
        loss += functional.nll_loss(output, labels, reduction="sum").item()
        num_correct += int((output.argmax(1) == labels).sum())
        num_tested += len(labels)
    loss = metric_average(loss / num_tested, "avg_loss")
    accuracy = metric_average(num_correct / num_tested, "avg_accuracy")
    if hvd.rank() == 0:
        print(
            f"test loss {loss:.4f} test accuracy {accuracy:.2%} on {hvd.size()} ranks"
        )


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)

    # Horovod: each rank has its own part of the data.
    train_set = read_dataset(args.data, "train")
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank())
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    test_set = read_dataset(args.data, "t10k")
    test_sampler = DistributedSampler(test_set, hvd.size(), hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, 1000, sampler=test_sampler)

    # Horovod: the learning rate grows with the ranks.
    model = Net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr * hvd.size(), momentum=0.5
    )

    # Horovod: all begin with what rank 0 has, and average gradients.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    fp16 = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
    )
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(model, optimizer, train_loader, epoch)
        test(model, test_loader)


if __name__ == "__main__":
    main()
