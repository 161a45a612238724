"""Exchange of Python objects: pickled for users, as JSON for ronde itself.

Loading a pickle can run any code, so pickles are loaded only if the program itself
sends objects.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, Protocol

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]  it has none
import torch
from torch import Tensor

from ronde.collectives.communicator import Communicator
from ronde.collectives.engine import Work
from ronde.errors import CollectiveError

_HEADER_BYTES = 8
_FIRST_BYTES = 4096
"""Bytes of an object that are sent with its length; usually the whole object."""
_FAILED = -1


class TensorGroup(Protocol):
    """A group of ranks that broadcasts and gathers tensors, like ``Communicator``."""

    rank: int
    size: int

    def broadcast(self, tensor: Tensor, root: int) -> Work[Tensor]: ...

    def all_gather(self, tensor: Tensor) -> Work[Tensor]: ...


def broadcast_object(communicator: TensorGroup, obj: Any, root: int) -> Any:  # noqa: ANN401  objects
    """Return ``root``'s object on every rank; collective.

    Raises:
        CollectiveError: On the other ranks, if ``root`` could not pickle its object.
    """
    payload = _broadcast(communicator, lambda: cloudpickle.dumps(obj), root)
    return obj if communicator.rank == root else cloudpickle.loads(payload)


def all_gather_object(communicator: TensorGroup, obj: object) -> list[Any]:
    """Return the objects of all ranks, in rank order; collective.

    Raises:
        CollectiveError: Another rank could not pickle its object.
    """
    payloads = _all_gather(communicator, lambda: cloudpickle.dumps(obj))
    return [cloudpickle.loads(payload) for payload in payloads]


def broadcast_json(
    communicator: TensorGroup, make: Callable[[], Any], root: int
) -> Any:  # noqa: ANN401  JSON's
    """Return ``root``'s JSON value on every rank; only ``root`` calls ``make``."""
    return json.loads(_broadcast(communicator, lambda: _dump(make()), root))


def all_gather_json(communicator: TensorGroup, value: Any) -> list[Any]:  # noqa: ANN401  JSON's
    return [json.loads(p) for p in _all_gather(communicator, lambda: _dump(value))]


def exchange_hosts(communicator: Communicator, host: str) -> list[str]:
    return [name.decode() for name in communicator.exchange(host.encode())]


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()


def _pack(num_bytes: int, payload: bytes) -> bytes:
    return num_bytes.to_bytes(_HEADER_BYTES, sys.byteorder, signed=True) + payload


def _unpack(message: bytes | bytearray) -> int:
    return int.from_bytes(message[:_HEADER_BYTES], sys.byteorder, signed=True)


def _broadcast(
    communicator: TensorGroup, dump: Callable[[], bytes], root: int
) -> bytes:
    """Return ``root``'s ``dump()`` on every rank; if it raises, all ranks raise."""
    is_root = communicator.rank == root
    message = _pack(_FAILED, b"")
    try:
        if is_root:
            payload = dump()
            message = _pack(len(payload), payload)
    finally:
        padded = bytearray(message.ljust(_FIRST_BYTES, b"\0"))
        whole = torch.frombuffer(padded, dtype=torch.uint8)
        communicator.broadcast(whole[:_FIRST_BYTES], root).wait()
    num_bytes = _unpack(padded)
    if num_bytes == _FAILED:
        raise CollectiveError(
            f"rank {root} could not send its object. See that rank's own error."
        )
    end = _HEADER_BYTES + num_bytes
    if end > _FIRST_BYTES:
        if not is_root:
            first, whole = whole, torch.empty(end, dtype=torch.uint8, device="cpu")
            whole[:_FIRST_BYTES] = first
        communicator.broadcast(whole[_FIRST_BYTES:], root).wait()
    return whole[_HEADER_BYTES:end].numpy().tobytes()


def _all_gather(communicator: TensorGroup, dump: Callable[[], bytes]) -> list[bytes]:
    """Return every rank's ``dump()``; if one raises, all ranks raise."""
    length, payload = _FAILED, b""
    try:
        payload = dump()
        length = len(payload)
    finally:
        packed = bytearray(_pack(length, payload))
        message = torch.frombuffer(packed, dtype=torch.uint8)
        gathered = communicator.all_gather(message).wait()
    whole = gathered.numpy().tobytes()
    payloads: list[bytes] = []
    failed: list[int] = []
    start = 0
    for rank in range(communicator.size):
        end = start + _HEADER_BYTES
        num_bytes = _unpack(whole[start:end])
        if num_bytes == _FAILED:
            failed.append(rank)
        start = end + max(0, num_bytes)
        payloads.append(whole[end:start])
    if failed:
        raise CollectiveError(
            f"ranks {failed[:8]} could not send their objects. See the errors on these "
            "ranks."
        )
    return payloads
