"""The base class of the process group: torch's properties, and the start of calls."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd import profiler
from torch.distributed import Store

from ronde.collectives import Communicator, Work
from ronde.errors import CollectiveError
from ronde.process_group.arena import Arena
from ronde.process_group.attendance import Attendance, SideStore
from ronde.process_group.drift import GroupDrift
from ronde.process_group.works import (
    BackendError,
    FutureQueue,
    GroupWork,
    Late,
    as_backend_error,
)
from ronde.status.reporter import Part, add_source
from ronde.status.values import UNKNOWN, PendingCollective, name_group

Options = Any  # torch's options have no common type
Works = Sequence[Work[Any]]
_MESSAGES = ("send", "recv")  # between two ranks
_torch: Any = torch
_is_profiling: Callable[[], bool] = _torch.autograd._profiler_enabled  # noqa: SLF001  its only name
_ProcessGroup: Any = dist.ProcessGroup  # its stub names parameters differently


class GroupBase(_ProcessGroup):
    """Base class of ``RondeProcessGroup``, which adds the collectives."""

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(
        self,
        communicator: Communicator,
        store: Store,
        timeout: timedelta,
        drift: str = "off",
    ) -> None:
        """Take over ``communicator``; ``store`` is for error messages and drift checks.

        ``drift`` is off, warn or error.
        """
        super().__init__(communicator.rank, communicator.size)
        self._communicator, self._store = communicator, store
        self._rank, self._size = communicator.rank, communicator.size
        side = SideStore(store)
        self.drift = GroupDrift(side, self._rank, self._size, drift)
        self._name = self._desc = ""  # torch sets them later
        self._timeout_s = timeout.total_seconds()
        self._process = os.getpid()
        self._futures = FutureQueue()
        self._coalesced: list[GroupWork] | None = None
        self._sequence = self._num_monitored = 0
        self._arena: Arena | None = None
        self._attendance = Attendance(side, self._rank, self._size)
        add_source(self.report)

    # Properties

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def engine(self) -> str:
        """The name of the communicator's engine, as in ``GroupOptions``."""
        return self._communicator.engine

    @property
    def _device_types(self) -> list[torch.device]:
        names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(name) for name in names]

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "ronde"

    name = getBackendName

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, _device: torch.device) -> "GroupBase":
        return self

    def _get_backend_name(self) -> str:
        return "ronde"

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start(
        self,
        name: str,
        start: Callable[[], Works],
        finish: Callable[[list[Any]], list[Tensor]],
        opts: Options = None,
    ) -> GroupWork:
        """Start a call; ``finish`` converts the results of its works to tensors."""
        self._require_own_process()
        self._sequence += 1
        try:
            if _is_profiling():  # record_function costs 9 us in any case
                with profiler.record_function(f"ronde:{name}"):
                    works = start()
            else:
                works = start()
        except CollectiveError as error:
            raise as_backend_error(error) from error
        limit_s = opts.timeout.total_seconds() if opts is not None else -1.0
        limit_s = limit_s if limit_s > 0 else self._timeout_s
        number = None if name in _MESSAGES else self.drift.count_call()
        late = Late(self._attendance, self.abort, name, number)
        work = GroupWork(self._futures, works, finish, limit_s, late)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_each(
        self,
        name: str,
        start: Callable[[Any, Any], Work[Any]],
        store: Callable[[Tensor, Any], None],
        pairs: tuple[Sequence[Any], Sequence[Any]],
        opts: Options,
    ) -> GroupWork:
        """Start one call per pair of output and input; ``store`` copies each result."""
        outputs, inputs = pairs

        def start_all() -> Works:
            return [start(*pair) for pair in zip(outputs, inputs, strict=True)]

        def finish(results: list[Any]) -> list[Tensor]:
            for result, output in zip(results, outputs, strict=True):
                store(result, output)
            return list(outputs)

        return self._start(name, start_all, finish, opts)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise BackendError(
                f"this group belongs to process {self._process} and cannot be used in "
                f"its fork, process {os.getpid()}. Call init_process_group after the "
                "fork."
            )

    def report(self) -> Part:
        """Return the waits of more than a second, for this rank's status."""
        group = name_group(self._name, self._desc)
        try:
            ranks = tuple(dist.get_process_group_ranks(self))
        except (KeyError, RuntimeError, ValueError):
            ranks = (UNKNOWN,)
        now_s = time.monotonic()
        return Part(
            [
                PendingCollective(name, group, name, number, 0, now_s - begun_s, ranks)
                for (name, number), begun_s in self._attendance.waiting.copy().items()
            ]
        )

    def abort(self) -> None:
        self._require_own_process()
        self._communicator.abort()

    def shutdown(self) -> None:
        if os.getpid() == self._process:
            self._communicator.close()
