"""A node's work while the job runs: the agent's bytes, to the head and back."""

import os
import select
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from ronde.launch.joining.channel import Channel
from ronde.launch.lineage import children, sweep
from ronde.launch.signals import STOPPING, read_signals
from ronde.launch.wire import ProcessWire

_AGENT_END_S = 10.0
_UNANSWERED_S = 10.0
_COMPLAINT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class RelayEnd:
    """Why a node has nothing more to do.

    Attributes:
        result: The job's exit code as the head told it; None where it told none.
        interrupted_by: The signal that ended this node, 0 for none.
    """

    result: int | None
    interrupted_by: int


def relay(
    channel: Channel,
    agent: "subprocess.Popen[bytes]",
    signal_fd: int,
    complain: Callable[[bytes], object],
) -> RelayEnd:
    """Carry bytes between head and agent until the head has said how the job ended.

    Guarantees that when it returns no process is left that the agent has started, but
    those that the kernel does not let die. For the case that the agent is killed this
    process should adopt orphans (``lineage.adopt_orphans``).

    Args:
        channel: To the head; closed here.
        agent: From ``boot.start_local_agent``; ends here.
        signal_fd: From ``signals.caught_signals``: SIGINT, SIGTERM and the like end
            the job politely; a second one ends the agent, which ends its ranks at once.
        complain: Is given what the agent writes to its standard error.
    """
    others = children() - {agent.pid}
    wire = ProcessWire(agent)
    try:
        return _Relay(channel, wire, signal_fd, complain).run()
    finally:
        wire.close()
        if wire.wait(_AGENT_END_S) is None:
            wire.kill()
            wire.wait(_AGENT_END_S)
        sweep(on_reaped=_ignore, spared=others)
        # Last: who sees the connection end may believe that nothing is left here.
        channel.close()


def _ignore(_pid: int, _status: int) -> None:
    """Need no status: the agent has reported it."""


class _Relay:
    """One relay: at most one piece of data in hand for each direction."""

    def __init__(
        self,
        channel: Channel,
        wire: ProcessWire,
        signal_fd: int,
        complain: Callable[[bytes], object],
    ) -> None:
        self._channel = channel
        self._wire = wire
        self._signal_fd = signal_fd
        self._complain = complain
        self._to_agent = memoryview(b"")
        self._to_head = memoryview(b"")
        self._is_head_here = True
        self._is_agent_here = True
        self._has_errors = True
        self._is_hurried = False
        self._interrupted_by = 0
        self._is_asked = False

    def run(self) -> RelayEnd:
        """Relay to the end."""
        while self._is_head_here and not self._interrupted_by:
            for fd, events in self._poll():
                self._serve(fd, events)
            if self._is_agent_here and self._channel.is_ended:
                self._end_agent()
        return RelayEnd(self._channel.result, self._interrupted_by)

    def _poll(self) -> list[tuple[int, int]]:
        # Nothing more is read for a side that has not taken what there is.
        wanted = {self._signal_fd: select.POLLIN}
        wanted[self._channel.fd] = 0 if self._to_agent else select.POLLIN
        if self._to_head:
            wanted[self._channel.fd] |= select.POLLOUT
        if self._is_agent_here:
            if not self._to_head:
                wanted[self._wire.read_fd] = select.POLLIN
            elif not self._is_hurried:
                wanted[self._wire.read_fd] = 0
            if self._to_agent:
                wanted[self._wire.write_fd] = select.POLLOUT
            if self._has_errors:
                wanted[self._wire.error_fd] = select.POLLIN
        poll = select.poll()
        for fd, events in wanted.items():
            poll.register(fd, events)
        return poll.poll()

    def _serve(self, fd: int, events: int) -> None:
        if fd == self._signal_fd:
            self._take_signals()
        elif fd == self._channel.fd:
            self._serve_head(events)
        elif not self._is_agent_here:
            return
        elif fd == self._wire.error_fd:
            self._pass_on_complaints()
        elif fd == self._wire.read_fd and self._to_head:
            # The agent has ended while the head takes nothing.
            self._hurry()
        elif fd == self._wire.read_fd:
            self._read_agent()
        else:
            self._write_agent()

    def _hurry(self) -> None:
        """Wait no longer than 10 s for a head that may be gone for good.

        While the agent is here its lease sees to that.
        """
        self._is_hurried = True
        self._channel.require_answers(_UNANSWERED_S)

    def _take_signals(self) -> None:
        for number in read_signals(self._signal_fd):
            if signal.Signals(number) not in STOPPING:
                continue
            if self._is_asked or not self._is_agent_here:
                self._interrupted_by = number
            else:
                # The agent tells the head, which ends all ranks, here in their grace.
                self._is_asked = True
                os.kill(self._wire.pid, signal.SIGTERM)

    def _serve_head(self, events: int) -> None:
        if self._to_head:
            self._write_head()
        if not self._to_agent:
            self._read_head()
        elif events & (select.POLLHUP | select.POLLERR):
            self._is_head_here = False

    def _read_head(self) -> None:
        data = self._channel.read()
        if data is None:
            return
        if not data:
            self._is_head_here = False
        elif self._is_agent_here:
            self._to_agent = memoryview(data)
            self._write_agent()

    def _write_agent(self) -> None:
        try:
            taken = self._wire.write(self._to_agent)
        except BrokenPipeError:
            # Its last words may still be on their way.
            taken = len(self._to_agent)
        self._to_agent = self._to_agent[taken:]

    def _read_agent(self) -> None:
        data = self._wire.read()
        if data is None:
            return
        if not data:
            self._end_agent()
            return
        self._to_head = memoryview(data)
        self._write_head()

    def _write_head(self) -> None:
        try:
            while self._to_head:
                taken = self._channel.write(self._to_head)
                if not taken:
                    return
                self._to_head = self._to_head[taken:]
        except BrokenPipeError:
            self._is_head_here = False

    def _pass_on_complaints(self) -> None:
        try:
            data = os.read(self._wire.error_fd, _COMPLAINT_BYTES)
        except BlockingIOError:
            return
        self._has_errors = bool(data)
        if data:
            self._complain(data)

    def _end_agent(self) -> None:
        """Tell the head the agent's exit code; the job's is still to come."""
        while self._has_errors and _is_readable(self._wire.error_fd):
            self._pass_on_complaints()
        self._hurry()
        self._is_agent_here = False
        self._to_agent = memoryview(b"")
        self._wire.close()
        code = self._wire.wait(_AGENT_END_S)
        if self._is_head_here:
            self._channel.tell_result(_exit_code(code))


def _exit_code(code: int | None) -> int:
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
