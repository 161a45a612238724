"""Order on an accelerator between who submits, who carries out, and who waits.

Operations are carried out by whichever thread drives the coordinator, on that thread's
stream. What was submitted is ready when the submitter's stream has come so far; what
comes of it is ready for the stream of whoever waits. Events say so without stopping
the processor.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Mark:
    """A point on the stream that was current on a device.

    Args:
        device: A CUDA device.
    """

    __slots__ = ("_event", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def order(self) -> None:
        """Have the current stream go on only when this point was passed."""
        torch.cuda.current_stream(self.device).wait_event(self._event)


def keep_for_current_stream(tensors: Iterable[Tensor]) -> None:
    """Have memory that another stream allocated kept until this one is done with it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Return the point at which tensors are ready; None where they are now."""
    if not tensors or not tensors[0].is_cuda:
        return None
    return Mark(tensors[0].device)


@contextmanager
def after(marks: Sequence[Mark]) -> Generator[None]:
    """Work on the device of some marks, after all of them; anywhere without any."""
    if not marks:
        yield
        return
    with torch.cuda.device(marks[0].device):
        for mark in marks:
            mark.order()
        yield
