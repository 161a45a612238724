"""Checkpoints that load under another layout: torch's own, whole or not there at all.

Note [Whole or not there]
    Ranks write into ``NAME.partial``; once all have, rank 0 gives it its name. A
    checkpoint of the name is moved to ``NAME.previous`` first, and removed last.
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
# Else the list of all parameters is one entry, of which a pipeline's ranks have parts.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    layout: Layout | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and optimizer state into a folder that all ranks see; collective.

    The format is that of ``torch.distributed.checkpoint``, under the plain names of
    parameters. A failure leaves what was there.

    Args:
        path: The folder; one that is there is replaced.
        model: Sharded or not, as ``optimizer``'s parameters; of a pipeline its
            ``stages``.
        optimizer: A plain one of torch.
        layout: What to note of how it was written.
        notes: What else to keep, as JSON has it: the step, the place in the data.
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
    """Read what ``save`` wrote, under any layout, in place; collective.

    It runs code of whoever wrote the folder, as torch's checkpoints are pickles: read
    your own only.

    Returns:
        The notes.

    Raises:
        UsageError: There is no such checkpoint, or it is that of another model.
    """
    target = Path(path)
    if not (target / _NOTES).is_file():
        previous = target.with_name(f"{target.name}.previous")
        is_left = (previous / _NOTES).is_file()
        cure = f" {previous} is the one before." if is_left else ""
        raise UsageError(
            f"path must be a folder that save() wrote, got {str(target)!r}, which has "
            f"no {_NOTES}.{cure}"
        )
    # Ranks of a pipeline have other parameters each.
    for difference in gather_objects(_difference(target, model)):
        if difference:
            raise UsageError(
                f"path must be a checkpoint of this model, got {str(target)!r}, where "
                f"{difference}."
            )
    state = _state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=target)  # into what is in it
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_BY_NAME,
    )
    return cast("dict[str, Any]", json.loads((target / _NOTES).read_text())["notes"])


def _difference(path: Path, model: nn.Module) -> str:
    """Return what a checkpoint has not as the model has it; empty if nothing."""
    stored = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, value in get_model_state_dict(model).items():
        entry = stored.get(f"model.{name}")
        if entry is None:
            return f"there is no {name}"
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
