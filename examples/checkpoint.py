"""A training that can go on after a restart: what it is made of, and where it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ronde.torch as hvd
from ronde.errors import UsageError


@dataclass(slots=True)
class Training:
    """A training under way: all of it that a step changes.

    Attributes:
        model: Equal on all ranks, as is all but ``loss_sum``.
        optimizer: Over the model's parameters.
        schedule: Of the optimizer's learning rate.
        step: Steps taken, in all epochs.
        loss_sum: Of this rank's steps in this epoch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: int = 0
    loss_sum: float = 0.0

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Keep where the training is in a file of rank 0's. Collective.

        The file is the whole of this step's state or the whole of an earlier one's,
        whenever the job is killed.

        Args:
            path: The file.
            settings: What a training that goes on from there must have in common.
        """
        loss_sums = hvd.allgather_object(self.loss_sum, name="loss_sums")
        if hvd.rank() != 0:
            return
        state = {
            "position": {
                "settings": dict(settings),
                "step": self.step,
                "loss_sums": loss_sums,
                "schedule": self.schedule.state_dict(),
            },
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def resume(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Go on from a file that rank 0 has, or begin where it has none. Collective.

        It leaves the model and the optimizer as rank 0 has them; no other rank needs
        to see the file. Call it before the optimizer is made a distributed one.

        Args:
            path: What ``save`` has written.
            settings: As ``save`` takes them.

        Raises:
            UsageError: The file is of a training with other settings.
        """
        state: dict[str, Any] = {}
        if hvd.rank() == 0 and path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
        position = hvd.broadcast_object(state.get("position"), name="position")
        if position is not None:
            _require_equal(path, position["settings"], settings)
            self.step = position["step"]
            self.loss_sum = position["loss_sums"][hvd.rank()]
            self.schedule.load_state_dict(position["schedule"])
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.share()

    def share(self) -> None:
        """Give every rank the model and the optimizer of rank 0. Collective."""
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)


def _require_equal(
    path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise UsageError(
                f"{name} must be that of the checkpoint {path}, {saved.get(name)}, got "
                f"{value}. Take another file to begin anew."
            )
