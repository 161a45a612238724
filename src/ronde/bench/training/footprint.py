"""Whether a model fits, found out without allocating any of it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import ronde.torch as hvd
from ronde.bench.training.batches import NUM_PREPARED, make_samples
from ronde.bench.training.models import build
from ronde.bench.training.options import Dtype, OptimizerKind, TrainOptions
from ronde.bench.training.replica import loss_of
from ronde.errors import UsageError
from ronde.memory import available_memory
from ronde.units import format_size


@dataclass(frozen=True, slots=True)
class Footprint:
    """The least that one rank needs.

    Attributes:
        fixed_bytes: Weights, gradients and the optimizer's state of all replicas.
        sample_bytes: Inputs and what backward needs of forward, for one sample.
    """

    fixed_bytes: int
    sample_bytes: int

    def num_bytes(self, batch: int) -> int:
        """Return the least that a batch of that many samples needs."""
        return self.fixed_bytes + batch * self.sample_bytes

    def largest_batch(self, num_bytes: int) -> int:
        """Return the samples of a batch that so much memory may hold; 0 for none."""
        return max(0, (num_bytes - self.fixed_bytes) // self.sample_bytes)


def measure_footprint(options: TrainOptions, num_replicas: int) -> Footprint:
    """Return what a rank needs at least.

    It runs the forward pass on tensors that have a shape and no data, as on a CPU, and
    adds up what backward would find saved. Workspaces, and the gradients of
    activations, come on top.
    """
    is_mixed = options.dtype is Dtype.BFLOAT16
    # Not the meta device: there attention keeps matrices that no real device keeps.
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        model = build(options.model.name)
        one, two = (
            _saved_bytes(model, *make_samples(options.model, n)) for n in (1, 2)
        )
        data = sum(tensor.nbytes for tensor in make_samples(options.model, 1))
    num_copies = 4 if options.optimizer is OptimizerKind.ADAM else 3
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    a_sample = two - one  # the rest is there once, such as weights cast to bfloat16
    return Footprint(
        fixed_bytes=num_replicas * num_copies * weights + one - a_sample,
        sample_bytes=a_sample + num_replicas * NUM_PREPARED * data,
    )


def _saved_bytes(model: nn.Module, inputs: Tensor, labels: Tensor) -> int:
    # Storages are kept until the sum is made, so that none takes another one's place.
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storages[_identity(tensor)] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model(inputs), labels)
    for each in (inputs, labels, *model.parameters(), *model.buffers()):
        storages.pop(_identity(each), None)
    return sum(storage.nbytes() for storage in storages.values())


def _identity(tensor: Tensor) -> int:
    """Return what views of one storage have in common; data has no address here."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def require_fit(options: TrainOptions, device: torch.device, num_replicas: int) -> None:
    """Refuse what cannot fit; collective, and every rank comes to the same end.

    Raises:
        UsageError: On some rank memory is less than the least that is needed.
    """
    footprint = measure_footprint(options, num_replicas)
    share, remedy = _share(device)
    least = int(hvd.allreduce(torch.tensor(share), op=hvd.Min))
    needed = footprint.num_bytes(options.batch)
    if needed <= least:
        return
    largest = footprint.largest_batch(least)
    cure = f"Type: --batch {largest}" if largest else remedy
    raise UsageError(
        f"batch must fit the memory of a rank, which is {format_size(least)}, got "
        f"{options.batch}: {options.model.name} takes at least "
        f"{format_size(footprint.fixed_bytes)} + {options.batch} * "
        f"{format_size(footprint.sample_bytes)} = {format_size(needed)}. {cure}"
    )


def _share(device: torch.device) -> tuple[int, str]:
    """Return the bytes that this rank may take, and what to do for more."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], "Take a smaller model."
    available = available_memory()
    return available.num_bytes // hvd.local_size(), available.remedy
