"""What a rank of a layout would hold at its peak, found without ranks and memory.

A step is run in this process alone, over tensors without data and a process group that
sends nothing, while torch's memory trackers count.
"""

import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule

from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.parallel.memory import MemoryTerm, RankMemory
from ronde.torch.parallel.sharding import find_device_type, init_mesh, parallelize

_KEPT_SHARE = 0.5
"""Of the tensors' bytes: 0.3 to 0.5 were measured on shared memory, up to 1 on Gloo."""
_NAMES = {
    "Sharded Param": "weights",
    "Unsharded Param": "gathered weights",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "unit's gradients",
    "Buffer": "buffers",
    "Activation": "activations",
    "All Gather": "all_gather",
    "Reduce Scatter": "reduce_scatter",
    "OptState": "optimizer state",
    "Inputs": "inputs",
    "Temp": "temporary",
    # Of a model that is not sharded over dp:
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer state",
    "Other": "inputs",
}


def estimate(
    build: Callable[[], nn.Module],
    layout: Layout,
    batch: Sequence[Tensor],
    loss_of: Callable[..., Tensor],
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    device_type: str | None = None,
    **options: Any,  # noqa: ANN401  parallelize's
) -> RankMemory:
    """Return the peak memory of rank 0 in a training step, in bytes by kind.

    ``RankMemory.shortage(limit_bytes)`` is a sentence if that is more than a device
    has. On CPU "process" is this process's memory now, with the interpreter and torch,
    and "allocator" a share of the tensors that glibc keeps when they are freed. On GPUs
    what CUDA, the allocator and the communication library add is not in it.

    Args:
        build: Makes the model; nothing of it is allocated.
        layout: Without -1, pp and cp.
        batch: The tensors of one rank; their values do not matter.
        loss_of: ``loss_of(model, *batch)``.
        make_optimizer: Of parameters; None takes AdamW. With ``foreach=False``, as the
            temporaries of the others are not seen right.
        device_type: "cuda" or "cpu"; None takes what is there.
        **options: As for ``parallelize``.

    Raises:
        UsageError: This process is in a process group; or as ``parallelize``.
    """
    if dist.is_initialized():
        raise UsageError(
            "estimate() must be called in a process without a process group, got one "
            "with. Call it before init_process_group(), or in a program of its own."
        )
    # It registers backend "fake" when it is imported.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def adamw(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401  Optimizer's
        return torch.optim.AdamW(parameters, foreach=False)

    base_bytes = _resident_bytes()
    size = layout.num_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_mesh(layout, "cpu", allow_tp_over_hosts=True)
        # Meshes are tensors with values, which there are none of in the mode.
        with torch.device("meta"):
            model = parallelize(build(), mesh, **options)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model.to_empty(device="cpu")
            optimizer = (make_optimizer or adamw)(model.parameters())
            inputs = [mode.from_tensor(tensor) for tensor in batch]
            _step(model, optimizer, inputs, loss_of)  # makes the optimizer's state
            if isinstance(model, FSDPModule):
                tracker = FSDPMemTracker(model, optimizer)
                tracker.track_inputs(tuple(inputs))
            else:
                tracker = MemTracker()
                tracker.track_external(model, optimizer, *inputs)
            with tracker:
                _step(model, optimizer, inputs, loss_of)
            peak = tracker.get_tracker_snapshot("peak")
    finally:
        dist.destroy_process_group()
    # Its kinds are words, and the total is one more.
    counted = peak.get(torch.device("cpu"), {})
    terms = [
        MemoryTerm(_NAMES[str(kind.value)], size)
        for kind, size in counted.items()
        if isinstance(kind, Enum) and size
    ]
    if (device_type or find_device_type()) == "cpu":
        kept_bytes = round(_KEPT_SHARE * sum(term.size_bytes for term in terms))
        terms.append(MemoryTerm("allocator", kept_bytes))
        terms.append(MemoryTerm("process", base_bytes))
    return RankMemory(tuple(sorted(terms, key=lambda term: -term.size_bytes)))


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[Tensor],
    loss_of: Callable[..., Tensor],
) -> None:
    optimizer.zero_grad()
    loss_of(model, *inputs).backward()
    optimizer.step()
