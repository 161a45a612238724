"""How ranks tell each other their sizes before rows of unequal numbers move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from ronde.collectives.arithmetic import as_bytes
from ronde.collectives.engines.scheduled.lane import Lane
from ronde.collectives.engines.scheduled.programs import Programs
from ronde.collectives.layouts import Layout, require_agreement
from ronde.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Agreement:
    """The ranks' exchange of layouts.

    Attributes:
        lane: What carries it out.
        programs: This rank's.
    """

    lane: Lane
    programs: Programs

    def check(self, name: str, tensor: Tensor, checking: Callable[[], T]) -> T:
        """Check this rank's arguments; tell the others, who wait, when they are bad.

        Args:
            name: The collective.
            tensor: This rank's.
            checking: Raises ``UsageError``, or returns what it found.
        """
        try:
            return checking()
        except UsageError:
            self._exchange(Layout(name, str(tensor.dtype), (), is_refused=True))
            raise

    def reach(
        self, name: str, tensor: Tensor, splits: Sequence[int], out: Tensor | None
    ) -> list[Layout]:
        """Return the layouts of all ranks; collective and blocking.

        Raises:
            CollectiveError: They do not fit together.
        """
        out_rows = None if out is None else out.shape[0]
        own = Layout(
            name, str(tensor.dtype), tuple(tensor.shape), tuple(splits), out_rows
        )
        layouts = self._exchange(own)
        require_agreement(layouts)
        return layouts

    def _exchange(self, layout: Layout) -> list[Layout]:
        size = self.programs.size
        own = layout.encode(size)
        gathered = own.new_empty((size, own.numel()))
        gathered[self.programs.rank] = own
        # So short a message is told in the fewest rounds, whatever the algorithm is.
        programs = replace(self.programs, algorithm="halving_doubling")
        program = programs.all_gather((own.numel() * own.element_size(),) * size)
        vector = as_bytes(gathered)
        self.lane.submit(
            layout.call, lambda executor: executor.run(program, vector)
        ).wait()
        return [Layout.decode(row, size) for row in gathered]
