"""Connect an optimizer with its counterparts on the other ranks.

Note [Connecting at first use]
    When an optimizer is first used, it requests a communicator from the coordinator.
    The request's name is a digest of the parameters' names, shapes and dtypes, plus the
    optimizer's number among this rank's optimizers with equal parameters. Like all
    named requests, such requests may come in any order and are watched for stalls. The
    ranks connect once all have sent the same name.

    In two cases all ranks of a set wait under different names. If their models differ,
    all raise an error that shows the difference. If one rank has made an additional
    equal optimizer, such as a copy, the optimizers that wait are connected.
"""

import hashlib
import json
import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ronde.coordination.coordinator import Coordinator
from ronde.coordination.requests import Entry, OpKind
from ronde.coordination.waits import SyncPoint, Waits
from ronde.data_parallel import JoinParticipant, ReducerGroup, ReducerKey
from ronde.data_parallel.group import Steps
from ronde.data_parallel.rounds import describe, require_equal
from ronde.errors import UnpairedError
from ronde.session.operations import Allgather
from ronde.session.session import ProcessSet, ProcessSetState, state_of


class Connector:
    """The ``GroupConnector`` of one optimizer.

    Its name stays the same in later sessions, for Horovod's elastic training.
    """

    key: ReducerKey  # identifies the optimizer on all ranks

    def __init__(
        self,
        process_set: ProcessSet,
        named_parameters: Sequence[tuple[str, Tensor]],
        suffix: str = "",
    ) -> None:
        self._process_set = process_set
        self._parameters = [describe(*each) + suffix for each in named_parameters]
        first = named_parameters[0][0] if named_parameters else "none"
        digest = _digest("\n".join([suffix, *self._parameters]))
        self._label = f"optimizer.{first}.{digest}"
        self._number: int | None = None
        self._name = ""
        self._coordinator: weakref.ref[Coordinator] | None = None
        self._entry: Entry | None = None
        self._participant: weakref.ref[JoinParticipant] | None = None
        # This thread may still use the session while another one already waits.
        self._state().coordinator.waits.add_user()

    @property
    def waits(self) -> Waits:
        return self._state().coordinator.waits

    def register(self, participant: JoinParticipant) -> None:
        """Register an object for ``join()`` to use and ``shutdown()`` to disconnect."""
        self._participant = weakref.ref(participant)
        self._state().participants.add(participant)

    def start(self) -> SyncPoint:
        return self._state().coordinator.point(self._request().name)

    def connect(self, *, is_watched: bool = True) -> Steps[ReducerGroup]:
        while True:
            coordinator, entry = self._state().coordinator, self._request()
            with coordinator.watch(entry.name) if is_watched else nullcontext():
                yield entry
                try:
                    communicator, number = entry.wait()
                except UnpairedError:
                    yield from self._compare()
                else:
                    break
                finally:
                    self._entry = None
        return ReducerGroup(
            communicator, coordinator, self.key.set_id, number, coordinator.waits
        )

    def give_up(self) -> None:
        coordinator = self._coordinator and self._coordinator()
        if coordinator is not None and self._entry is not None:
            coordinator.give_up(self._entry)
        self._entry = None

    def _request(self) -> Entry:
        coordinator = self._state().coordinator
        if self._entry is None:
            self._entry = coordinator.connect(self._name)
        return self._entry

    def _state(self) -> ProcessSetState:
        state = state_of(self._process_set, OpKind.ALLREDUCE)
        known = self._coordinator and self._coordinator()
        if known is not state.coordinator:
            self._coordinator = weakref.ref(state.coordinator)
            self._entry = None
            self._number = state.claim_number(self._label, self._number)
            self._set_name(state, str(self._number))
            participant = self._participant and self._participant()
            if participant is not None:
                state.participants.add(participant)
        return state

    def _set_name(self, state: ProcessSetState, number: str) -> None:
        self._name = f"{self._label}.{number}"
        set_id = self._process_set.process_set_id or 0
        self.key = ReducerKey(set_id, int(_digest(self._name), 16), len(state.ranks))

    def _compare(self) -> Steps[None]:
        """Compare models of ranks that wait under different names; agree on one."""
        line = json.dumps([self._name, self._parameters]) + "\n"
        sent = torch.frombuffer(bytearray(line.encode()), dtype=torch.uint8)
        work = Allgather(self._process_set, "optimizer.parameters").start((sent,))
        yield work
        (gathered,) = work.wait()
        lines = bytes(gathered.tolist()).decode().splitlines()
        names, parameters = zip(*map(json.loads, lines), strict=True)
        require_equal(parameters)
        self._set_name(self._state(), _digest(" ".join(names)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
