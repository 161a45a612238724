"""The sends and receives of one of Gloo's groups, and how they are broken off."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ronde.collectives.engines.torch_distributed.work import Awaited, Pending

_UNUSED_TAG = (1 << 31) - 1
_SHORT = timedelta(milliseconds=1)


class Messages:
    """What of the sends and receives of a group is not over, or failed."""

    def __init__(self, rank: int, size: int) -> None:
        self._peers = [peer for peer in range(size) if peer != rank]
        self._awaited: WeakSet[Awaited] = WeakSet()
        self._lock = threading.Lock()
        self._is_broken = False

    def post(self, call: Callable[..., Pending], tensor: Tensor, *to: int) -> Awaited:
        """Call Gloo's ``send`` or ``recv``; return what is waited for.

        Args:
            call: What posts the message.
            tensor: Its bytes.
            to: The peer and the tag.
        """
        try:
            awaited = Awaited(call([tensor], *to))
        except RuntimeError:
            self._is_broken = True
            raise
        with self._lock:
            self._awaited.add(awaited)
        return awaited

    def break_off(self, gloo: Any) -> None:  # noqa: ANN401  as in groups.py
        """Make all fail that are not over: whoever waits for one, anywhere, is told.

        Gloo has no call for that, and a group that is let go lives on in its messages.
        But one message that times out ends all connections of its group.
        """
        with self._lock:
            is_idle = all(awaited.is_over for awaited in self._awaited)
        if is_idle and not self._is_broken:
            return
        for peer in self._peers:
            try:
                gloo.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_SHORT)
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return  # of a peer that is gone it is no time-out
