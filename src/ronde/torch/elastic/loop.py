"""The loop of an elastic training: a step that fails is undone and done again.

Note [What a step leaves behind]
    Until ``optimizer.step()`` has returned, a step has changed gradients, the model's
    buffers (running statistics) and generators of random numbers, which are put back;
    parameters it has not touched. In the moment it returns, count and position move.
    So nothing is copied per step but buffers. Only where a step has several optimizers
    one may have stepped when another fails: then all is copied before.

    Of two survivors one may have applied the step that failed for the other: then its
    parameters hold the gradients of all, also of who was lost, and the other takes
    them over. Nobody does that step again.

    An optimizer with ``zero=1`` communicates while it steps, and each rank has but a
    share of its state. So there all go back to copies: see Note [Versions].
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
from ronde.torch.elastic.data import DataSource, ElasticLoader, Share, refuse_unplaced
from ronde.torch.elastic.training import Training, require_same
from ronde.torch.elastic.weights import GradientWeights
from ronde.torch.functions import broadcast_object
from ronde.torch.mpi_ops import Max, allreduce
from ronde.torch.optimizer import DistributedOptimizer

_logger = logging.getLogger("ronde")
_SAVE = "elastic.save"
_NO_COPY = (
    "each rank's share of the optimizer's state must be left on some rank, got none of "
    "ranks that were lost together with those that kept their copies, and there is no "
    "checkpoint. Give Loop one, with a small checkpoint_every."
)


class Step(AbstractContextManager["Step"]):
    """One step; everything from its forward pass to ``optimizer.step()`` is in it."""

    def __init__(self, loop: "Loop", share: Share, number: int) -> None:
        self.number = number  # from 0 on, over all epochs
        self.share = share
        self.is_applied = False
        self._loop = loop

    @property
    def epoch(self) -> int:
        """The number of times that the data was gone through before."""
        return self.share.start.epoch

    @property
    def ids(self) -> Sequence[int]:
        """The samples of this rank."""
        return self.share.ids

    @property
    def inputs(self) -> Any:
        """The collated samples of this rank."""
        return self.share.inputs

    @property
    def micro_batches(self) -> Iterator[Any]:
        """The collated samples of this rank, one micro-batch after the other."""
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
    """Yield the steps of a training that goes on when ranks are lost, leave and join.

    ::

        for step in hvd.elastic.Loop(model, optimizer, data, batch=512, epochs=3):
            with step:
                loss_of(model(step.inputs)).backward()
                optimizer.step()

    In a ``with`` block that fails since a rank was lost, gradients, buffers and random
    numbers are put back, and the step is done again by the ranks that are left. What
    follows ``optimizer.step()`` in it is not. New ranks get the state of the others.
    Outside of an elastic job it only iterates, and gives all ranks the state of rank 0.

    Args:
        model: Equal on all ranks; what it is wrapped in afterwards does not matter.
        optimizer: A ``DistributedOptimizer``, or several; all or none with ``zero=1``,
            of which each rank keeps the share of another one, on another host.
        data: An ``ElasticLoader`` or ``ElasticShards``, or a map-style data set.
        batch: Of a data set: samples a step, of all ranks together.
        epochs: Of a data set: how often to go through it.
        objects: What else has ``state_dict()`` and ``load_state_dict()``, such as
            learning-rate schedulers and gradient scalers, by name. Equal on all ranks.
        on_change: Called when the ranks have changed, and at the start.
        copy_every: With ``zero=1``, steps from one copy to the next. When a rank is
            lost, as many may have to be done again.
        checkpoint: A directory; the state is written there every ``checkpoint_every``
            steps by rank 0 and read at a start where nobody has a newer one.

    Raises:
        UsageError: An argument does not fit, or this rank's model or version of torch
            is not that of the others, or a share and its copy were lost together, and
            there is no checkpoint.
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
        self._step: Step | None = None  # under way
        self._num_stepped = 0  # of its optimizers
        self._saved: dict[str, Tensor] = {}
        self._generators: list[Tensor] = []
        self.weights = GradientWeights(model.parameters(), *self._optimizers)
        self._copies = _make_copies(self._optimizers, copy_every)
        for each in self._optimizers:
            _call_after_steps(each, self._take_step)

    @property
    def num_applied(self) -> int:
        """How many steps are applied, by all ranks that ever were."""
        return self._training.num_applied

    def __iter__(self) -> Iterator[Step]:
        if self._member is None:
            self._settle_in(None)
        else:
            self._go_on_from_start()
        while True:
            if (step := self._next()) is not None:
                yield step
                if self._step is step:
                    raise UsageError(
                        "a step must be done in its block, got none. Type: with step:"
                    )
            elif self._finish():
                return

    def _go_on_from_start(self) -> None:
        try:
            begins = current_session().begins
            if begins is not None:  # this process was in the view from its beginning
                self._settle_in(begins)
                return
        except CollectiveError as error:
            self._recover(error)
        else:
            self._go_on()

    # Steps

    def _next(self) -> Step | None:
        """Return the next step, None after the last; settle where that is due."""
        while True:
            try:
                is_over = ""
                if self._member is not None:
                    self._member.allow(self._training.num_applied + 1)
                    is_over = self._member.should_settle(self._training.num_applied)
                # Not before: what follows the step may change objects, too.
                self._keep(is_over)
                if is_over:
                    self._go_on()
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
        """Prepare the step, and what it takes to undo it."""
        self._num_stepped = 0
        for each in self._optimizers:
            each.zero_grad()
        self.weights.begin(step.share)
        if self._member is None:
            return
        self._generators = _read_generators()
        tensors = self._undone()
        if tensors:
            self._save(tensors)

    def end_step(self, step: Step, error: BaseException | None) -> bool:
        """Count the step, or undo it and go on in the next view."""
        self._step = None
        if error is None:
            if not step.is_applied:  # such as one that a gradient scaler has skipped
                self._apply(step)
            return False
        if self._member is None or not isinstance(error, CollectiveError):
            return False
        if not step.is_applied:
            self._undo()
        self._recover(error)
        return True

    def _take_step(self, *_: object) -> None:
        self._num_stepped += 1
        if self._step is not None and self._num_stepped == len(self._optimizers):
            self._apply(self._step)

    def _apply(self, step: Step) -> None:
        step.is_applied = True
        self._training.position = step.share.position
        self._training.num_applied = step.number + 1
        if self._member is not None:
            self._member.step = self._training.num_applied

    def _keep(self, is_over: str) -> None:
        """Keep copies, and write a checkpoint, of the applied steps where it is due."""
        training, copies, member = self._training, self._copies, self._member
        step = training.num_applied
        is_due = step != self._written and self._checkpoints.is_due(step)
        if copies is None:
            if member is not None and member.is_save_asked:
                member.is_save_asked, is_due = False, True
        else:
            is_wanted = is_over or copies.is_due(step)
            if member is not None and is_wanted and copies.newest != step:
                copies.take(training)
                # Only rank 0 is asked, and all give it their shares.
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
        _copy_from(self._saved, self._undone())
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

    def _undone(self) -> dict[str, Tensor]:
        """Return what is put back when a step fails."""
        if len(self._optimizers) > 1 and self._copies is None:
            return self._training.tensors()
        return dict(self._training.model.named_buffers())

    # Views

    def _recover(self, error: CollectiveError) -> None:
        _logger.info("Step %d fails: %s", self._training.num_applied, error)
        self._go_on(shorten(error))

    def _go_on(self, reason: str = "") -> None:
        """Leave the view; return as a rank of a later one, with the newest state."""
        while True:
            if self._copies is not None and self._member is not None:
                self._member.applied = self._training.num_applied
                self._member.step = self._copies.newest
            try:
                self._settle_in(reform(reason))
            except CollectiveError as error:
                _logger.info("The next view fails, too: %s", error)
                reason = shorten(error)
            else:
                return

    def _settle_in(self, begins: ViewBegins | None) -> None:
        """Take over the state that counts, and this rank's part of the data."""
        root = current_session().source
        newest = NEW if begins is None else begins.step
        if self._copies is not None:
            self._deal(self._copies, root, newest)
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
            _logger.warning("Goes on from step %d, of a checkpoint.", found["step"])
        return found is not None

    def _deal(self, copies: ShareCopies, root: int, newest: int) -> None:
        """Have each rank take its share of the newest version that is left."""
        training, member = self._training, self._member
        found = copies.find()
        if found is not None:
            own = training.describe()
            require_same(own, broadcast_object(own, root))
            copies.bring_back(found, training)
        else:
            copies.begin(is_new=newest == NEW)
            if member is not None:
                member.step = NEW
            is_loaded = broadcast_object(self._load_checkpoint(root), root)
            if newest != NEW and not is_loaded:
                raise UsageError(_NO_COPY)
            training.broadcast(root, NEW, member)
        if member is not None:
            copies.take(training)

    def _finish(self) -> bool:
        """Return whether all have applied the last step; else go on."""
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
        refuse_unplaced(data)
        if batch is None or epochs is None:
            raise UsageError(
                "batch and epochs must be given with a data set, got "
                f"batch={batch} and epochs={epochs}."
            )
        return ElasticLoader(data, batch, epochs=epochs)
    if batch is not None or epochs is not None:
        raise UsageError(
            f"batch and epochs must be left out with {type(data).__name__}, which has "
            "its own."
        )
    return data


def _call_after_steps(optimizer: Optimizer, function: Callable[..., None]) -> None:
    share = DistributedOptimizer.share_of(optimizer)
    if share is None:
        optimizer.register_step_post_hook(function)
    else:  # its hooks are called before the ranks have each other's shares
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
