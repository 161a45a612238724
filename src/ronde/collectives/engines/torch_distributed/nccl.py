"""NCCL's process group, with messages that start together, and an orderly end."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from ronde.collectives.engines.torch_distributed.work import Pending
from ronde.errors import UsageError

_CLOSE_WITHIN_S = 5.0
"""How long what is under way may take to end by itself, and the peers to let go."""


class Nccl:
    """One process group of NCCL's, connected; collective to make.

    Connected at once, since the first call would do it, and wait there for the other
    ranks: two groups whose first calls come in another order on another rank would wait
    for ever.

    Attributes:
        group: torch's, for collectives.
        device: Where its tensors are.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        device: torch.device,
    ) -> None:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise UsageError(
                "torch must be built with NCCL to reduce CUDA tensors, got "
                f"{torch.__version__}."
            ) from error
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001  the only name
        self.device = device
        self.group: Any = ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(device):
            self.group.eager_connect_single_device(device)
        self._gathered: list[Message] = []

    def send(self, values: Tensor, to: int, tag: int) -> Pending:
        """Send contiguous bytes, once it is waited for or anything else is called."""
        _require_no_tag(tag)
        return self._gather(lambda: self.group.send([values], to, 0))

    def recv(self, values: Tensor, source: int, tag: int) -> Pending:
        """Receive contiguous bytes; starts as ``send`` does."""
        _require_no_tag(tag)
        return self._gather(lambda: self.group.recv([values], source, 0))

    def start_messages(self) -> None:
        """Start what was gathered, as one group.

        A message keeps the stream until its counterpart runs. Started one by one, two
        ranks that both receive first and then send would wait for ever.
        """
        messages, self._gathered = self._gathered, []
        if not messages:
            return
        self.group._start_coalescing()  # noqa: SLF001  it has no other name
        try:
            for message in messages:
                message.post()
        finally:
            work = self.group._end_coalescing()  # noqa: SLF001  likewise
        for message in messages:
            message.work = work

    def close(self) -> None:
        """End connections and threads: gracefully if that is soon done, or else not.

        Aborted at once, NCCL would drop what the network has not yet taken, which
        another rank waits for. But a peer that is gone is waited for in vain.
        """
        self._gathered.clear()
        if not self._is_idle():
            self.group.abort()
            return
        thread = threading.Thread(target=self._shut_down, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python itself ends, and starts no thread any more
            self.group.abort()
            return
        thread.join(_CLOSE_WITHIN_S)

    def abort(self) -> None:
        """Have what is under way fail."""
        self._gathered.clear()
        self.group.abort()

    def _gather(self, post: Callable[[], object]) -> "Message":
        message = Message(self, post)
        self._gathered.append(message)
        return message

    def _is_idle(self) -> bool:
        """Wait a moment for the stream; say whether it has done all it was given."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        end_s = time.monotonic() + _CLOSE_WITHIN_S
        while not done.query():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.001)
        return True

    def _shut_down(self) -> None:
        with suppress(RuntimeError), torch.cuda.device(self.device):
            self.group.shutdown()


class Message:
    """A send or receive that has started, or will with others: torch's ``Work``.

    Attributes:
        work: Of the group that it has started with.
    """

    __slots__ = ("_nccl", "_post", "_ready", "work")

    def __init__(self, nccl: Nccl, post: Callable[[], object]) -> None:
        self._nccl = nccl
        self._post = post  # holds the tensor, too
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(nccl.device))
        self.work: Any = None

    def post(self) -> None:
        """Give it to NCCL, on whichever stream is current by now."""
        torch.cuda.current_stream(self._nccl.device).wait_event(self._ready)
        self._post()

    def is_completed(self) -> bool:
        """Say whether the bytes have arrived; have it start."""
        return bool(self._started().is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> object:
        """Order the current stream after them; with a timeout, block the thread."""
        return self._started().wait(timeout)

    def _started(self) -> Any:  # noqa: ANN401  torch's stubs give works no common type
        if self.work is None:
            self._nccl.start_messages()
        if self.work is None:
            raise RuntimeError("the communicator was closed")
        return self.work


def _require_no_tag(tag: int) -> None:
    if tag:
        raise UsageError(
            f"tag must be 0 for CUDA tensors, got {tag}: NCCL has no tags. Leave it "
            "out, and receive in the order in which the other rank sends."
        )
