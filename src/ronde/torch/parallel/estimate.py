"""The peak memory of a rank under a layout, computed without running its ranks.

A step runs in this process alone, on tensors without data and with a process group that
sends nothing, under torch's memory trackers.
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
"""Kept by glibc, per byte of tensors: measured 0.3 to 0.5, with Gloo up to 1."""
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
    # The names for a model that is not sharded over dp:
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

    ``RankMemory.shortage(limit_bytes)`` returns a message if a limit is exceeded.
    On CPU the kind "process" is this process's current memory, with the interpreter and
    torch; "allocator" estimates the freed memory that glibc keeps. On GPUs the memory
    of CUDA, the allocator and the communication library is not included.

    Args:
        build: Makes the model; its memory is not allocated.
        layout: A layout without -1, pp and cp.
        batch: The tensors of one rank; their values do not matter.
        loss_of: ``loss_of(model, *batch)``.
        make_optimizer: Makes the optimizer from parameters, by default AdamW. Use
            ``foreach=False``, as temporaries of foreach optimizers are miscounted.
        device_type: "cuda" or "cpu", by default "cuda" if it is available.
        **options: Options of ``parallelize``.

    Raises:
        UsageError: This process has a process group, or ``parallelize`` raises it.
    """
    if dist.is_initialized():
        raise UsageError(
            "estimate() cannot run in a process with a process group. Call it before "
            "init_process_group(), or in a separate program."
        )
    # The import registers backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def adamw(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401  Optimizer's
        return torch.optim.AdamW(parameters, foreach=False)

    base_bytes = _resident_bytes()
    size = layout.num_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_mesh(layout, "cpu", allow_tp_over_hosts=True)
        # Outside FakeTensorMode, as meshes are tensors with values.
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
    # The snapshot also has a total, under a plain string.
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
