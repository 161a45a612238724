"""Checkpoints of an elastic job, for a restart after the loss of all ranks."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

from ronde.errors import UsageError

_NAME = re.compile(r"step-(\d+)\.pt")
_NUM_KEPT = 2
_logger = logging.getLogger("ronde")


class Checkpoints:
    """Checkpoint files ``step-N.pt`` in a directory.

    A file gets this name once it is complete.
    """

    def __init__(self, directory: str, every: int) -> None:
        """Write to ``directory`` every ``every`` steps; an empty path disables this."""
        if every < 1:
            raise UsageError(f"checkpoint_every must be at least 1, got {every}.")
        self._directory = Path(directory) if directory else None
        self._every = every
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def has_directory(self) -> bool:
        """True if checkpoints are enabled."""
        return self._directory is not None

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after ``step`` steps."""
        return self.has_directory and step % self._every == 0

    def write(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint, and delete all older ones except the last.

        A failure to write, for example on a full disk, is logged as a warning.
        """
        if self._directory is None:
            return
        path = self._directory / f"step-{step}.pt"
        draft = path.with_suffix(f".{os.getpid()}.draft")
        try:
            for left in self._directory.glob("step-*.draft"):  # of a killed writer
                left.unlink(missing_ok=True)
            with draft.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except (OSError, RuntimeError) as error:
            # After a failed write torch raises the error of closing the archive.
            reason = error if isinstance(error, OSError) else error.__context__
            draft.unlink(missing_ok=True)
            if not isinstance(reason, OSError):
                raise
            newest = self._found()[-1:]
            _logger.warning(
                "Could not write the checkpoint of step %d to %s: %s. Training "
                "continues. The newest complete checkpoint: %s.",
                step,
                self._directory,
                reason.strerror,
                newest[0][1].name if newest else "none",
            )
            return
        for _, old in self._found()[:-_NUM_KEPT]:
            old.unlink(missing_ok=True)

    def read_newest(self) -> dict[str, Any] | None:
        """Return the newest state, or None if there is no checkpoint."""
        for _, path in reversed(self._found()):
            return torch.load(path, map_location="cpu", weights_only=True)
        return None

    def _found(self) -> list[tuple[int, Path]]:
        if self._directory is None:
            return []
        names = ((_NAME.fullmatch(p.name), p) for p in self._directory.iterdir())
        return sorted((int(match[1]), path) for match, path in names if match)
