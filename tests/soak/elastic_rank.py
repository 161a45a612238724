"""A rank that ``elastic_faults.py`` breaks: ``elastic_rank.py FOLDER [zero]``.

Rank's own files in the folder, by its process's number: what it did to which samples
(``ledger-*``), and when it was in which view and had applied which step, with a
checksum of the weights (``progress-*``). The training ends with the epoch in which
``finish`` appears in the folder.

Note [Sums that do not depend on their order]
    A gradient is rounded to a multiple of ``size * 2^-40``. Divided by ``size`` as the
    optimizer does it, it is a multiple of 2^-40, to the last bit: the quotient has few
    bits, and the error of ``1 / size`` is below half of the last place. So all sums of
    them are exact, and one process can find the same weights.
"""

import faulthandler
import json
import signal
import sys
import time
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import ledger  # noqa: E402  found by the line above

import ronde.torch as hvd  # noqa: E402
from ronde.membership import own_member  # noqa: E402

NUM_SAMPLES, BATCH = 100, 24  # the last batch of an epoch leaves some without samples
_STEP_S = 0.01  # of other work, so that others have the processor too
_UNIT = 2.0**-40


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, which imports no ``torch._dynamo``: torch's own does."""

    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.02, "momentum": 0.9})

    @torch.no_grad()
    def step(self) -> None:
        """Move all weights against their gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(weight)
                velocity = state["velocity"].mul_(group["momentum"]).add_(weight.grad)
                weight.add_(velocity, alpha=-group["lr"])


def make_model() -> nn.Module:
    torch.manual_seed(7)
    layers = nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(24, 3)).double()


def make_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, 12, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].sin() + 0.1 * inputs[:, 3:6]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def rounded(gradient: Tensor, size: int) -> Tensor:
    """See Note [Sums that do not depend on their order]."""
    return torch.round(gradient / (size * _UNIT)) * _UNIT * size


@contextmanager
def rounded_gradients(model: nn.Module, size: int) -> Generator[None]:
    """Round the gradients of backward, after all other hooks."""
    hooks = [p.register_hook(lambda g: rounded(g, size)) for p in model.parameters()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def checksum(model: nn.Module) -> int:
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return zlib.crc32(b"".join(parts))


class Ending:
    """The epoch with which the training ends: part of the state, as all must agree."""

    def __init__(self, loader: hvd.elastic.ElasticLoader) -> None:
        self._loader = loader

    def end_with(self, epoch: int) -> None:
        self._loader.epochs = epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._loader.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.epochs = state["epochs"]


def main(folder: Path, *, is_divided: bool) -> None:
    """Train until ``finish`` appears; divided, each has a share of the velocity."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)
    hvd.init()
    member = own_member()
    if member is None:
        raise SystemExit("start it by ronde run --min-ranks")
    progress = (folder / f"progress-{member.number}").open("a", buffering=1)
    book = folder / f"ledger-{member.number}"

    def report(kind: str, *values: object) -> None:
        line = [kind, time.monotonic(), member.view.view, *values]
        progress.write(json.dumps(line) + "\n")

    def report_view() -> None:
        members = [tuple(each) for each in member.view.members]
        report("view", members, loop.num_applied, checksum(model))

    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        Momentum(model.parameters()),
        named_parameters=model.named_parameters(),
        zero=int(is_divided),
    )
    samples = torch.utils.data.TensorDataset(*make_samples())
    loader = hvd.elastic.ElasticLoader(samples, BATCH, seed=3)
    ending = Ending(loader)
    # A share may be lost together with its copy.
    checkpoint = str(folder / "checkpoints") if is_divided else ""
    loop = hvd.elastic.Loop(
        *(model, optimizer, loader),
        objects={"end": ending},
        on_change=report_view,
        copy_every=5,
        checkpoint=checkpoint,
        checkpoint_every=12,
    )
    for step in loop:
        with step, rounded_gradients(model, hvd.size()):
            view, ids = member.view.view, tuple(step.ids)
            entry = ledger.Entry(
                member.number, view, 0, step.number, step.epoch,
                step.share.batch_size, ids, is_applied=False,
            )  # fmt: skip
            ledger.write(book, entry)
            time.sleep(_STEP_S)
            is_last = torch.tensor([int((folder / "finish").exists())])
            is_last = hvd.allreduce(is_last, op=hvd.Max, name="finish")
            loss_of(model, *step.inputs).backward()
            optimizer.step()
            if is_last.item():
                ending.end_with(step.epoch)
            ledger.write(book, entry._replace(is_applied=True))
            report("step", step.number, checksum(model))
    report("end", loop.num_applied, checksum(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]), is_divided="zero" in sys.argv[2:])
