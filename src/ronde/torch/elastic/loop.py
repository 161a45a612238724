"""The training loop of an elastic job, which undoes and repeats a failed step.

Note [Undoing a step]
    Until ``optimizer.step()`` returns, a step changes gradients, the model's buffers
    (running statistics) and random number generators, but no parameters. So only
    buffers and generators are saved before each step. When ``optimizer.step()``
    returns, step count and position advance. With several optimizers one may have
    stepped when another fails, so all state is saved.

    One survivor may have applied a step that failed on another. The applied step has
    the gradients of all ranks, lost ones included. So the other survivor copies the
    parameters, and the step is not repeated.

    An optimizer with ``zero=1`` communicates while it steps, and each rank has only a
    share of its state. So all ranks return to older copies: see Note [Versions] in
    ``copies``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ronde.errors import CollectiveError, UsageError
from ronde.membership.member import Member, own_member
from ronde.membership.view import NEW, ViewBegins
from ronde.session.lifetime import reform, shorten
from ronde.session.session import current_session, rank, size
from ronde.torch.elastic.checkpoint import Checkpoints
from ronde.torch.elastic.copies import ShareCopies
from ronde.torch.elastic.data import (
    DataSource,
    ElasticLoader,
    Share,
    require_position,
)
from ronde.torch.elastic.training import Training, require_same
from ronde.torch.elastic.weights import GradientWeights
from ronde.torch.functions import broadcast_object
from ronde.torch.mpi_ops import Max, allreduce
from ronde.torch.optimizer import DistributedOptimizer

_logger = logging.getLogger("ronde")
_SAVE = "elastic.save"
_NO_COPY = (
    "a share of the optimizer's state was lost together with its copy, and there is no "
    "checkpoint. Pass a checkpoint directory to Loop, with a small checkpoint_every."
)


class Step(AbstractContextManager["Step"]):
    """One step, from its forward pass to ``optimizer.step()``."""

    def __init__(self, loop: "Loop", share: Share, number: int) -> None:
        self.number = number  # counted from 0 over all epochs
        self.share = share
        self.is_applied = False
        self._loop = loop

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.share.start.epoch

    @property
    def ids(self) -> Sequence[int]:
        """The ids of this rank's samples."""
        return self.share.ids

    @property
    def inputs(self) -> Any:
        """The collated samples of this rank."""
        return self.share.inputs

    @property
    def micro_batches(self) -> Iterator[Any]:
        """An iterator over this rank's micro-batches, each collated."""
        return self._loop.weights.micro_batches(self.share)

    def __enter__(self) -> Self:
        self._loop.begin_step(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._loop.end_step(self, error)


class Loop:
    """Training steps of a job in which ranks may fail, leave and join.

    ::

        for step in hvd.elastic.Loop(model, optimizer, data, batch=512, epochs=3):
            with step:
                loss_of(model(step.inputs)).backward()
                optimizer.step()

    If a ``with`` block fails because a rank was lost, gradients, buffers and random
    numbers are restored, and the remaining ranks repeat the step. Code in the block
    after ``optimizer.step()`` is not repeated. New ranks get the state of the others.
    Outside of an elastic job all ranks start with the state of rank 0.

    Args:
        model: The model, equal on all ranks. It may be wrapped afterwards.
        optimizer: A ``DistributedOptimizer``, or several. If one has ``zero=1``, all
            must; each rank then keeps a copy of another rank's share.
        data: An ``ElasticLoader`` or ``ElasticShards``, or a map-style data set.
        batch: The number of samples per step, over all ranks; only with a data set.
        epochs: The number of epochs; only with a data set.
        objects: Other objects with ``state_dict()`` and ``load_state_dict()``, such as
            learning-rate schedulers and gradient scalers, by name. All ranks must
            pass the same names.
        on_change: Called at the start and after each change of ranks.
        copy_every: With ``zero=1``, the number of steps between copies. When a rank is
            lost, up to this number of steps is repeated.
        checkpoint: A directory, to which rank 0 writes the state every
            ``checkpoint_every`` steps. A job without state loads the newest checkpoint.

    Raises:
        UsageError: An argument is invalid, or this rank's model or version of torch
            differs from the others', or a share and its copy were lost together
            without a checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        data: Any,
        *,
        batch: int | None = None,
        epochs: int | None = None,
        objects: Mapping[str, Any] | None = None,
        on_change: Callable[[], object] | None = None,
        copy_every: int = 10,
        checkpoint: str = "",
        checkpoint_every: int = 1000,
    ) -> None:
        self._optimizers = cast(
            "list[Optimizer]",
            list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer],
        )
        self._data = _as_source(data, batch, epochs)
        self._training = Training(
            model, self._optimizers, self._data, dict(objects or {})
        )
        self._on_change = on_change
        self._checkpoints = Checkpoints(checkpoint, checkpoint_every)
        self._member: Member | None = own_member()
        self._written = 0  # the step of the newest checkpoint
        self._step: Step | None = None  # in progress
        self._num_stepped = 0  # optimizers that have stepped in it
        self._saved: dict[str, Tensor] = {}
        self._generators: list[Tensor] = []
        self.weights = GradientWeights(model.parameters(), *self._optimizers)
        self._copies = _make_copies(self._optimizers, copy_every)
        for each in self._optimizers:
            _call_after_steps(each, self._on_step)

    @property
    def num_applied(self) -> int:
        """The number of steps applied since training began, including earlier views."""
        return self._training.num_applied

    def __iter__(self) -> Iterator[Step]:
        if self._member is None:
            self._start_view(None)
        else:
            self._start_first_view()
        while True:
            if (step := self._next()) is not None:
                yield step
                if self._step is step:
                    raise UsageError(
                        "a step was never entered. Write its code in: with step: ..."
                    )
            elif self._finish():
                return

    def _start_first_view(self) -> None:
        try:
            begins = current_session().begins
            if begins is not None:  # else this process joins a running job
                self._start_view(begins)
                return
        except CollectiveError as error:
            self._recover(error)
        else:
            self._change_view()

    # Steps

    def _next(self) -> Step | None:
        """Return the next step, or None at the end; change the view if needed."""
        while True:
            try:
                is_over = ""
                if self._member is not None:
                    self._member.allow(self._training.num_applied + 1)
                    is_over = self._member.should_settle(self._training.num_applied)
                # Not right after the step: code that follows it may change objects.
                self._store_state(is_over)
                if is_over:
                    self._change_view()
                    continue
                share = next(self._data)
            except StopIteration:
                return None
            except CollectiveError as error:
                self._recover(error)
            else:
                self._step = Step(self, share, self._training.num_applied)
                return self._step

    def begin_step(self, step: Step) -> None:
        """Reset gradients, and save the state for undoing the step."""
        self._num_stepped = 0
        for each in self._optimizers:
            each.zero_grad()
        self.weights.begin(step.share)
        if self._member is None:
            return
        self._generators = _read_generators()
        self._save(self._undone_tensors())

    def end_step(self, step: Step, error: BaseException | None) -> bool:
        """Count the step; after a failed collective, undo it and enter a new view."""
        self._step = None
        if error is None:
            if not step.is_applied:  # a gradient scaler may skip step()
                self._apply(step)
            return False
        if self._member is None or not isinstance(error, CollectiveError):
            return False
        if not step.is_applied:
            self._undo()
        self._recover(error)
        return True

    def _on_step(self, *_: object) -> None:
        self._num_stepped += 1
        if self._step is not None and self._num_stepped == len(self._optimizers):
            self._apply(self._step)

    def _apply(self, step: Step) -> None:
        step.is_applied = True
        self._training.position = step.share.position
        self._training.num_applied = step.number + 1
        if self._member is not None:
            self._member.step = self._training.num_applied

    def _store_state(self, is_over: str) -> None:
        training, copies, member = self._training, self._copies, self._member
        step = training.num_applied
        is_due = step != self._written and self._checkpoints.is_due(step)
        if copies is None:
            if member is not None and member.is_save_asked:
                member.is_save_asked, is_due = False, True
        else:
            is_wanted = is_over or copies.is_due(step)
            if member is not None and is_wanted and copies.newest != step:
                copies.make(training)
                # Only rank 0 gets the request, but all must send it their shares.
                asked, member.is_save_asked = member.is_save_asked, False
                own = torch.tensor([int(asked)])
                is_asked = bool(allreduce(own, name=_SAVE, op=Max))
                is_due = is_due or (is_asked and self._checkpoints.has_directory)
            for each in self._optimizers if is_due else ():
                cast("DistributedOptimizer", each).consolidate_state_dict()
        if is_due:
            self._written = step
            if rank() == 0:
                self._checkpoints.write(step, training.state_dict())

    def _undo(self) -> None:
        _copy_from(self._saved, self._undone_tensors())
        _write_generators(self._generators)
        self._data.seek(self._training.position, rank(), size())

    def _save(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                kept = self._saved.get(name)
                if kept is None or kept.shape != tensor.shape:
                    self._saved[name] = tensor.detach().clone()
                else:
                    kept.copy_(tensor)

    def _undone_tensors(self) -> dict[str, Tensor]:
        if len(self._optimizers) > 1 and self._copies is None:
            return self._training.tensors()
        return dict(self._training.model.named_buffers())

    # Views

    def _recover(self, error: CollectiveError) -> None:
        _logger.info("Step %d failed: %s", self._training.num_applied, error)
        self._change_view(shorten(error))

    def _change_view(self, reason: str = "") -> None:
        """Leave the view, and enter a later view with the newest state."""
        while True:
            if self._copies is not None and self._member is not None:
                self._member.applied = self._training.num_applied
                self._member.step = self._copies.newest
            try:
                self._start_view(reform(reason))
            except CollectiveError as error:
                _logger.info("The next view failed as well: %s", error)
                reason = shorten(error)
            else:
                return

    def _start_view(self, begins: ViewBegins | None) -> None:
        """Load the newest state, and find this rank's part of the data."""
        root = current_session().source
        newest = NEW if begins is None else begins.step
        if self._copies is not None:
            self._restore_shares(self._copies, root, newest)
        elif begins is None or not begins.is_equal:
            if newest == NEW:
                self._load_checkpoint(root)
            self._training.broadcast(root, newest, self._member)
        self._data.seek(self._training.position, rank(), size())
        if self._on_change is not None:
            self._on_change()
        if self._member is not None:
            self._member.step = self._training.num_applied
            self._member.running()

    def _load_checkpoint(self, root: int) -> bool:
        found = self._checkpoints.read_newest() if rank() == root else None
        if found is not None:
            self._training.load_state_dict(found)
            _logger.warning("Resuming from the checkpoint of step %d.", found["step"])
        return found is not None

    def _restore_shares(self, copies: ShareCopies, root: int, newest: int) -> None:
        """Restore the newest complete version, or a checkpoint if there is none."""
        training, member = self._training, self._member
        found = copies.find()
        if found is not None:
            own = training.describe()
            require_same(own, broadcast_object(own, root))
            copies.restore(found, training)
        else:
            copies.begin(is_new=newest == NEW)
            if member is not None:
                member.step = NEW
            is_loaded = broadcast_object(self._load_checkpoint(root), root)
            if newest != NEW and not is_loaded:
                raise UsageError(_NO_COPY)
            training.broadcast(root, NEW, member)
        if member is not None:
            copies.make(training)

    def _finish(self) -> bool:
        """Wait until all ranks have applied the last step; False if one was lost."""
        if self._member is None:
            return True
        try:
            self._member.done(self._training.num_applied)
        except CollectiveError as error:
            self._recover(error)
            return False
        return True


def _as_source(data: Any, batch: int | None, epochs: int | None) -> DataSource:
    if not isinstance(data, DataSource):
        require_position(data)
        if batch is None or epochs is None:
            raise UsageError(
                "batch and epochs are required with a data set, got "
                f"batch={batch} and epochs={epochs}."
            )
        return ElasticLoader(data, batch, epochs=epochs)
    if batch is not None or epochs is not None:
        raise UsageError(
            f"batch and epochs cannot be used with {type(data).__name__}, which has "
            "its own."
        )
    return data


def _call_after_steps(optimizer: Optimizer, function: Callable[..., None]) -> None:
    share = DistributedOptimizer.share_of(optimizer)
    if share is None:
        optimizer.register_step_post_hook(function)
    else:  # its hooks are called before the ranks have exchanged their shares
        share.on_stepped = function


def _make_copies(optimizers: Sequence[Optimizer], every: int) -> ShareCopies | None:
    found = [DistributedOptimizer.share_of(each) for each in optimizers]
    shares = [each for each in found if each is not None]
    if shares and len(shares) < len(found):
        raise UsageError(
            "zero must be 1 for all optimizers of a Loop or for none, got 1 for "
            f"{len(shares)} of {len(found)}."
        )
    return ShareCopies(shares, every) if shares else None


@torch.no_grad()
def _copy_from(kept: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in kept:
            tensor.copy_(kept[name])


def _read_generators() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _write_generators(states: list[Tensor]) -> None:
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
