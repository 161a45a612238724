"""Requests that may come again, by number: the same on every rank."""

from collections import OrderedDict

from ronde.coordination.ranges import bits_of
from ronde.coordination.requests import Request


class Cache:
    """What all ranks remember, kept alike by obeying the same orders.

    Attributes:
        epoch: Resets so far; see Note [Cached requests are bits].
        live: The numbers in use, as bits.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.live = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, number: int, request: Request) -> None:
        """Remember a request under a number that was never used in this epoch."""
        self._requests[number] = request
        self._numbers[request.name] = number
        self.live |= 1 << number

    def find(self, name: str) -> tuple[int, Request] | None:
        """Return the request of that name and its number."""
        number = self._numbers.get(name)
        return None if number is None else (number, self._requests[number])

    def get(self, bits: int) -> list[Request]:
        """Return requests by their numbers, ascending, given as bits."""
        requests = self._requests
        return [requests[number] for number in bits_of(bits)]

    def touch(self, bits: int) -> None:
        """Note that these were used just now."""
        for number in bits_of(bits):
            self._requests.move_to_end(number)

    def use(self, name: str) -> None:
        """Note that the request of that name, if there is one, was used just now."""
        number = self._numbers.get(name)
        if number is not None:
            self._requests.move_to_end(number)

    def remove(self, number: int) -> None:
        """Forget a request."""
        request = self._requests.pop(number)
        del self._numbers[request.name]
        self.live &= ~(1 << number)

    def reset(self) -> None:
        """Forget all, and use the numbers from 0 on again."""
        self.epoch += 1
        self.live = 0
        self._requests.clear()
        self._numbers.clear()

    def by_age(self) -> list[int]:
        """Return the numbers, those first that were not used for longest."""
        return list(self._requests)
