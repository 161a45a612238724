"""Checkpoints that can be loaded under another layout, in torch's format.

Note [Atomic checkpoints]
    Ranks write into ``NAME.partial``; then rank 0 renames it. An old checkpoint of that
    name is first moved to ``NAME.previous``, and removed at the end.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import ronde
from ronde.errors import UsageError
from ronde.parallel.layout import Layout
from ronde.torch.parallel.equal_weights import gather_objects

_NOTES = "ronde.json"
# Flat, as each rank of a pipeline has only some of the parameters.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    layout: Layout | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and optimizer state into a folder on a shared disk; collective.

    The format is that of ``torch.distributed.checkpoint``, with the plain names of
    parameters. If writing fails, an old checkpoint stays.

    Args:
        path: The folder; an old one is replaced.
        model: The model that ``optimizer`` trains, sharded or not; for a pipeline, its
            ``stages``.
        optimizer: A plain torch optimizer.
        layout: The layout to record in the checkpoint.
        notes: JSON values to store, such as the step and the position in the data.
    """
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    note = {
        "layout": None if layout is None else str(layout),
        "num_ranks": dist.get_world_size(),
        "ronde": ronde.__version__,
        "torch": torch.__version__,
        "notes": dict(notes or {}),
    }
    text = json.dumps(note, indent=1)
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    checkpoint.save(_state_of(model, optimizer), checkpoint_id=partial)
    if is_first:
        (partial / _NOTES).write_text(text)
        _replace(partial, target)
    dist.barrier()


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Load a checkpoint written by ``save``, in place, under any layout; collective.

    torch's checkpoints are pickles, which can run code: load only your own.

    Returns:
        The notes given to ``save``.

    Raises:
        UsageError: There is no checkpoint, or it does not fit the model.
    """
    target = Path(path)
    if not (target / _NOTES).is_file():
        previous = target.with_name(f"{target.name}.previous")
        is_left = (previous / _NOTES).is_file()
        cure = f" The previous checkpoint is {previous}." if is_left else ""
        raise UsageError(
            f"path must be a folder that save() wrote, got {str(target)!r}, which has "
            f"no {_NOTES}.{cure}"
        )
    # Each rank of a pipeline has different parameters.
    for difference in gather_objects(_difference(target, model)):
        if difference:
            raise UsageError(
                f"the checkpoint {str(target)!r} does not fit this model: {difference}."
            )
    state = _state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=target)  # in place
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    return cast("dict[str, Any]", json.loads((target / _NOTES).read_text())["notes"])


def _difference(path: Path, model: nn.Module) -> str:
    """Describe the first difference between checkpoint and model, if any."""
    stored = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in get_model_state_dict(model).items():
        entry = stored.get(f"model.{name}")
        if entry is None:
            return f"it has no {name}"
        size = getattr(entry, "size", None)
        if isinstance(value, Tensor) and size is not None and size != value.shape:
            return f"{name} has shape {tuple(size)}, not {tuple(value.shape)}"
    return ""


def _state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_BY_NAME)
    return {"model": model_state, "optimizer": optimizer_state}


def _replace(partial: Path, target: Path) -> None:
    previous = target.with_name(f"{target.name}.previous")
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    partial.rename(target)
    shutil.rmtree(previous, ignore_errors=True)
