"""Rounds in which all ranks of a host show each other a tag and a few bytes, at once.

Note [One exchange]
    Every rank takes part in every round, once, and cannot take that back: so what comes
    of a round is the same on all ranks. The tags and bytes of a round lie apart from
    those of the next, and nobody takes part in a round before the one before it is
    complete: so they stay until all ranks have come to the next round but one, that is,
    have read them.

    A rank takes part (a store), then looks who has (loads); the last one so sees all,
    and wakes those who sleep. A sleeper marks that it sleeps, then looks once more,
    then sleeps on a word that its waker changes before it wakes: see words.py, Note
    [Memory order]. Several may find that they were last, and all store the same number.
"""

import time
from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from ronde.collectives.engines.shared_memory.segment import Segment
from ronde.collectives.engines.shared_memory.waiting import (
    CONTENTION,
    IS_WEAKLY_ORDERED,
    fence,
    sleep_while,
    wake_all,
)
from ronde.coordination.control.doorbell import NEAR, Doorbell

ROUND_BYTES = 4096
"""What a rank can show in a round."""
NUM_BYTES = 4096 + 2 * ROUND_BYTES
"""A page of words, and the bytes of two rounds."""
REFUSED = 0
"""The tag of a rank that has nothing to show."""
_LINE = 8
_NUMBER, _TAGS, _STATE, _WAKE = 0, 1, _LINE, 2 * _LINE
_AWAKE, _ASLEEP, _ASKING = 0, 1, 2
_FIRST_NAP_S = 0.001


class ExchangeRounds:
    """One rank's part in the rounds; one thread at a time, save where noted.

    Args:
        segments: All ranks' memory; zeros.
        start: Where ``NUM_BYTES`` for the rounds are in each.
        own: This rank's index in them.
        doorbells: All ranks' doorbells.

    Attributes:
        number: The last round that this rank took part in; the first is 1.
        has_waiter: Whether a thread is in ``wait``.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        start: int,
        own: int,
        doorbells: Sequence[Doorbell],
    ) -> None:
        words = [s.view[start : start + 4096].cast("Q") for s in segments]
        addresses = [s.address + start + 8 * _WAKE for s in segments]
        CONTENTION.expect(len(segments))
        self.number = 0
        self.has_waiter = False
        self._own, self._address = words[own], addresses[own]
        self._others = list(zip(words, addresses, doorbells, strict=True))
        del self._others[own]
        self._other_words = [each for each, _, _ in self._others]
        self._segments = [segment.tensor for segment in segments]
        self._start = start + 4096

    def views(self, dtype: torch.dtype, numel: int) -> list[list[Tensor]]:
        """Return all ranks' bytes as tensors: of even rounds, and of odd ones."""
        num_bytes = numel * dtype.itemsize
        # They outlive the call, and what that was made in.
        with torch.inference_mode(mode=False):
            return [
                [each[at : at + num_bytes].view(dtype) for each in self._segments]
                for at in (self._start, self._start + ROUND_BYTES)
            ]

    def take_part(self, tag: int) -> None:
        """Come to the next round, all bytes being there; the last must be complete."""
        number = self.number = self.number + 1
        own = self._own
        own[_TAGS + (number & 1)] = tag
        if IS_WEAKLY_ORDERED:
            fence()
        own[_NUMBER] = number
        fence()
        if self.is_complete(number):
            for words, address, doorbell in self._others:
                state = words[_STATE]
                if state == _ASLEEP:
                    words[_WAKE] = number
                    wake_all(address)
                elif state == _ASKING:
                    doorbell.notify()

    def is_complete(self, number: int) -> bool:
        """Return whether all have come to a round that this one came to; any thread."""
        for words in self._other_words:
            if words[_NUMBER] < number:
                return False
        if IS_WEAKLY_ORDERED:
            fence()
        return True

    def is_unanimous(self) -> bool:
        """Return whether all gave the same tag, and none refused, once complete."""
        place = _TAGS + (self.number & 1)
        tag = self._own[place]
        for words in self._other_words:
            if words[place] != tag:
                return False
        return tag != REFUSED

    def is_awaited(self) -> bool:
        return any(words[_NUMBER] > self.number for words in self._other_words)

    def is_asked(self) -> bool:
        """Return whether one of them wants an answer now."""
        return any(
            words[_STATE] == _ASKING and words[_NUMBER] > self.number
            for words in self._other_words
        )

    def wait(self, timeout_s: float) -> None:
        """Return when the round is complete, or will not be by itself.

        That is: it took too long, or another rank sleeps in an ordinary wait. The
        thread that took part may wait while others call ``is_complete``.
        """
        number, is_complete, pause = self.number, self.is_complete, CONTENTION.pause
        for _ in repeat(None, CONTENTION.num_looks(NEAR)):
            if is_complete(number):
                return
            if not pause():
                break
        own = self._own
        try:
            self.has_waiter = True
            own[_STATE] = _ASLEEP
            fence()
            self._sleep(number, time.monotonic() + timeout_s)
        finally:
            own[_STATE] = _AWAKE
            self.has_waiter = False

    def request_answers(self) -> None:
        """Have those answer who did not come, and the last one notify this rank."""
        self._own[_STATE] = _ASKING
        fence()
        for words, _, doorbell in self._others:
            if words[_NUMBER] < self.number:
                doorbell.notify()

    def rest(self) -> None:
        self._own[_STATE] = _AWAKE

    def _sleep(self, number: int, deadline: float) -> None:
        nap_s = _FIRST_NAP_S
        while True:
            value = self._own[_WAKE]
            if self.is_complete(number):
                return
            sleep_while(self._address, value & 0xFFFFFFFF, nap_s)
            if self.is_complete(number) or time.monotonic() >= deadline:
                return
            if any(
                words[_NUMBER] < number and doorbell.has_sleeper()
                for words, _, doorbell in self._others
            ):
                return
            nap_s *= 2
