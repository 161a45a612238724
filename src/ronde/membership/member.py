"""Exchange membership messages of this process with the controller."""

import functools
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from ronde.errors import LaunchError, MembershipError, WorldError
from ronde.membership.robust_mutex import lock_new_mutex
from ronde.membership.view import (
    NEW,
    NO_VIEW,
    TO_RANK,
    AskStep,
    AtStep,
    Done,
    Entered,
    Failed,
    Finish,
    FromRank,
    Leave,
    Save,
    Settled,
    StopAfter,
    ToRank,
    View,
    ViewBegins,
    ViewEnded,
    decode_text,
    encode_text,
)
from ronde.status.reporter import Part, add_source
from ronde.world.environment import read_channel, send_exit_notice

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 16 << 20
_MORE_STEPS = 1  # that may begin after ``AskStep``: Note [From one view to the next]
_MOST_REASON = 200  # characters
_logger = logging.getLogger("ronde")


class Member:
    """A worker's end of its membership channel, with a listening thread.

    The training loop sets ``step``, the number of applied steps. The listening thread
    calls ``on_change`` before a planned change, and sets ``is_save_asked`` for the
    writer of checkpoints, which clears it. Only one thread may call blocking methods.
    """

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.number = number
        self.step = NEW
        self.saved_step = NEW  # the step that a failure returns to, if it is older
        self.applied = NEW  # the number of applied steps before such a return
        self.view = View(NO_VIEW, ())  # the last view that this process was in
        self.reason = ""  # of the view's end; empty while it lasts
        self.is_save_asked = False
        self._sock = sock
        self._sending = threading.Lock()
        self._news = threading.Condition()
        self._begun: ViewBegins | None = None  # not returned yet
        self._asked_at: int | None = None  # the step at ``AskStep``
        self._stop: StopAfter | None = None
        self._on_end: list[Callable[[str], None]] = []
        self.on_change: Callable[[], None] = lambda: None
        self._leave: str | None = None
        self._is_finished = False
        self._loss = ""  # why the channel is gone
        self._mutex = -1  # sent with the first message
        with suppress(OSError):  # without it, this process's death is noticed later
            self._mutex = lock_new_mutex()
        threading.Thread(target=self._listen, name="ronde member", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return bool(self.reason)

    def report(self) -> Part:
        return Part(job_step=self.step)

    def join(self) -> tuple[View, ViewBegins]:
        """Wait for the first view; see ``settle``."""
        return self.settle(NEW)

    def settle(self, step: int, reason: str = "") -> tuple[View, ViewBegins]:
        """Report that all operations of the view have ended; wait for the next view.

        Args:
            step: The number of applied steps.
            reason: Why this process cannot continue; empty after a request to stop.

        Raises:
            SystemExit: This process is not in the next view, or the job is done.
            LaunchError: The launcher is gone.
        """
        self.step = step
        applied, self.applied = max(step, self.applied), NEW
        self._send(Settled(self.view.view, step, applied, reason))
        with self._news:
            self._news.wait_for(
                lambda: self._begun or self._is_gone or self._is_finished
            )
            begun, self._begun = self._begun, None
        if begun is not None:
            return self.view, begun
        if self._leave is None and not self._is_finished:
            raise LaunchError(f"Lost the connection to the launcher: {self._loss}.")
        if self._leave:
            _logger.info("process %d ends: %s", self.number, self._leave)
        raise SystemExit(0)

    def running(self) -> None:
        """Report that this process is connected and has the newest state."""
        self._send(Entered(self.view.view, self.step))

    def done(self, step: int) -> None:
        """Report that the last step is applied; wait until all ranks have applied it.

        Raises ``MembershipError`` if the view ends first.
        """
        self.step = step
        self.require_view()
        self._send(Done(self.view.view, step))
        with self._news:
            self._news.wait_for(lambda: self.reason or self._is_finished)
        if not self._is_finished:
            self.require_view()

    def fail(self, reason: str) -> None:
        """Report that this process is about to end, and abort all operations."""
        if self.view.view != NO_VIEW:
            self._send(Failed(self.view.view, self.step, reason))
            self._end(f"this rank failed with {reason}")

    def allow(self, step: int) -> None:
        """Wait until ``step`` may begin; see Note [From one view to the next].

        Raises ``MembershipError`` if the view has ended. Check ``should_settle`` then.
        """
        if self._asked_at is not None:
            with self._news:
                self._news.wait_for(lambda: self.reason or not self._is_early(step))
        self.require_view()

    def should_settle(self, step: int) -> str:
        """Return the reason to settle after ``step`` steps, or an empty text."""
        stop = self._stop
        return stop.reason if stop is not None and step >= stop.step else ""

    def call_on_end(self, function: Callable[[str], None]) -> None:
        """Call ``function`` with the reason when this view ends, in any thread."""
        with self._news:
            if not self.reason:
                self._on_end.append(function)
                return
        function(self.reason)

    def require_view(self) -> None:
        if self.reason:
            raise membership_error(self.view.view, self.reason)

    @property
    def _is_gone(self) -> bool:
        return self._leave is not None or bool(self._loss)

    def _is_early(self, step: int) -> bool:
        return self._asked_at is not None and step > self._asked_at + _MORE_STEPS

    def _send(self, message: FromRank) -> None:
        line = f"member {encode_text(message)}\n".encode()
        try:
            with self._sending:
                if self._mutex >= 0:
                    sent = socket.send_fds(self._sock, [line], [self._mutex])
                    os.close(self._mutex)
                    self._mutex, line = -1, line[sent:]
                self._sock.sendall(line)
        except OSError as error:
            self._lose(f"its channel broke ({error})")

    def _listen(self) -> None:
        unread = b""
        try:
            while data := self._sock.recv(_READ_BYTES):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    kind, _, text = line.decode().partition(" ")
                    if kind == "member":
                        self._on_message(decode_text(text, TO_RANK))
                if len(unread) > _MAX_LINE_BYTES:
                    break
            self._lose("it closed its channel")
        except (OSError, ValueError, LaunchError) as error:
            self._lose(f"its channel broke ({error})")

    def _lose(self, loss: str) -> None:
        with self._news:
            self._loss = self._loss or loss
        self._end(f"the launcher is gone: {loss}")

    def _on_message(self, message: ToRank) -> None:
        view = self.view.view
        match message:
            case ViewEnded() if message.view == view:
                self._end(message.reason)
            case AskStep() if message.view == view:
                with self._news:
                    step = self._asked_at = self.step
                self._send(AtStep(view, step))
                self.on_change()
            case StopAfter() if message.view == view:
                with self._news:
                    self._stop, self._asked_at = message, None
                    self._news.notify_all()
            case Save() if message.view == view:
                self.is_save_asked = True
            case ViewBegins():
                with self._news:
                    self.view = self.view.next(message)
                    self._begun, self.reason = message, ""
                    self._stop = self._asked_at = None
                    self._on_end = []
                    self._news.notify_all()
            case Leave():
                with self._news:
                    self._leave = message.reason
                self._end(message.reason or "it goes on without this process")
            case Finish():
                with self._news:
                    self._is_finished = True
                    self._news.notify_all()
            case ViewEnded() | AskStep() | StopAfter() | Save():
                pass  # about an earlier view

    def _end(self, reason: str) -> None:
        with self._news:
            self.reason = self.reason or reason
            functions, self._on_end = self._on_end, []
            self._news.notify_all()
        for function in functions:
            function(reason)


def membership_error(view: int, reason: str) -> MembershipError:
    return MembershipError(
        f"view {view} has ended: {reason}. hvd.elastic.Loop and @hvd.elastic.run "
        "continue in the next one."
    )


@functools.cache
def own_member() -> Member | None:
    """Return this process's member of an elastic job; None outside of one."""
    channel = read_channel()
    if channel is None or not channel.is_elastic:
        return None
    if channel.fd < 0:
        raise WorldError(
            "the socket of RONDE_CHANNEL is closed. Start the ranks of an elastic job "
            "without a wrapper that closes descriptors, and call init() in the rank "
            "itself, not in a child."
        )
    os.set_inheritable(channel.fd, False)  # noqa: FBT003  os's own
    member = Member(socket.socket(fileno=channel.fd), channel.worker)
    add_source(member.report)
    sys.excepthook = functools.partial(
        _report_failure, member, sys.excepthook, os.getpid()
    )
    return member


def _report_failure(
    member: Member,
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    pid: int,
    *raised: Any,  # noqa: ANN401
) -> None:
    """Report an uncaught exception at once, as Python may take seconds to exit."""
    show(*raised)
    error = raised[1]
    if isinstance(error, Exception) and os.getpid() == pid:
        send_exit_notice()
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        member.fail(text[:_MOST_REASON].rstrip(": ."))
