"""Python objects between ranks, pickled."""

from typing import Any, Protocol

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]  it has none
import torch
from torch import Tensor

from ronde.collectives.communicator import Communicator, Work
from ronde.errors import CollectiveError

_HEADER_BYTES = 8
_FAILED = -1


class Carrier(Protocol):
    """What carries an object's bytes: a ``Communicator``, or part of one."""

    rank: int
    size: int

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]:
        """See ``Communicator``."""
        ...

    def all_gather(self, tensor: Tensor) -> Work[Tensor]:
        """See ``Communicator``."""
        ...


def broadcast_object(communicator: Carrier, obj: Any, root: int) -> Any:  # noqa: ANN401  objects
    """Return ``root``'s object on every rank; collective.

    Args:
        communicator: The ranks.
        obj: On ``root`` what to send: anything cloudpickle takes. Elsewhere ignored.
        root: The rank to copy from.

    Returns:
        A copy; on ``root`` ``obj`` itself.

    Raises:
        CollectiveError: ``root`` could not pickle its object. There it is the error
            that pickling raised.
    """
    is_root = communicator.rank == root
    length = torch.tensor([_FAILED])
    payload = torch.empty(0, dtype=torch.uint8)
    try:
        if is_root:
            payload = _pickle(obj)
            length.fill_(payload.numel())
    finally:
        communicator.broadcast(length, root).wait()
    num_bytes = int(length.item())
    if num_bytes == _FAILED:
        raise CollectiveError(
            "broadcast_object needs an object that can be pickled, and rank "
            f"{root} got none; the error there says why."
        )
    if not is_root:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
    communicator.broadcast(payload, root).wait()
    return obj if is_root else _unpickle(payload)


def all_gather_object(communicator: Carrier, obj: object) -> list[Any]:
    """Return the objects of all ranks, in rank order; collective.

    Args:
        communicator: The ranks.
        obj: Anything cloudpickle takes.

    Returns:
        Copies, one's own included.

    Raises:
        CollectiveError: A rank could not pickle its object. There it is the error that
            pickling raised.
    """
    length = torch.tensor([_FAILED])
    payload = torch.empty(0, dtype=torch.uint8)
    try:
        payload = _pickle(obj)
        length.fill_(payload.numel())
    finally:
        message = torch.cat([length.view(torch.uint8), payload])
        gathered = communicator.all_gather(message).wait()
    objects: list[Any] = []
    start = 0
    failed: list[int] = []
    for rank in range(communicator.size):
        start += _HEADER_BYTES
        header = gathered[start - _HEADER_BYTES : start].clone()
        num_bytes = int(header.view(torch.int64).item())
        if num_bytes == _FAILED:
            failed.append(rank)
            continue
        objects.append(_unpickle(gathered[start : start + num_bytes]))
        start += num_bytes
    if failed:
        raise CollectiveError(
            "all_gather_object needs objects that can be pickled, and ranks "
            f"{failed[:8]} got none; the errors there say why."
        )
    return objects


def exchange_hosts(communicator: Communicator, host: str) -> list[str]:
    """Return the host of every rank, in rank order; collective.

    Args:
        communicator: The ranks.
        host: The name of this rank's host.
    """
    return [str(name) for name in all_gather_object(communicator, host)]


def _pickle(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _unpickle(payload: Tensor) -> Any:  # noqa: ANN401  whatever was pickled
    return cloudpickle.loads(payload.numpy().data)
