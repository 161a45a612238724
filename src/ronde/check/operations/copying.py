"""How fast a GPU copies: from the host, to it, and within its own memory."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ronde.check.facts import UnreadableError, Value
from ronde.check.operations.pci_link import (
    address_of,
    read_under_load,
    staying_near,
)

HOST_BYTES = 32 << 20
DEVICE_BYTES = 256 << 20
"""Of two buffers each; more than caches hold."""

Torch = Any
Tensor = Any

_NUM_IN_ROUND = 8
_MIN_ROUNDS = 3
_WARM_UP_S = 0.1
"""Clocks and link of an idle GPU are low, and take some time to rise."""

_ROUNDS_S = 0.2
_LOAD_S = 0.3
_MAX_LOAD = 1000
"""So many copies wait without the one who gives them being held up."""

_MAX_SAID_CHARS = 200


def examine_gpu(torch: Torch, number: int) -> dict[str, Value]:
    """Measure what a GPU copies, and read its PCI link meanwhile.

    Nothing else should run on the host. The memory that it takes is given back.

    Args:
        torch: The module.
        number: Of the GPU, as CUDA counts.

    Returns:
        ``copies`` has ``model``, ``is_near`` (whether the host's memory was on the
        GPU's side of it) and what ``measure_copies`` returns; ``link`` has ``address``
        and the parts of NVML's answer, and is nothing where there is no link to tell
        of. Either is ``failure`` alone where it could not be told.
    """
    try:
        model = torch.cuda.get_device_name(number)
        address = address_of(torch.cuda.get_device_properties(number))
        with (
            torch.cuda.device(number),
            staying_near(address) as is_near,
            _pinned(torch) as host,
        ):
            rates = _measure_gpu(torch, host)
            link = _read_link(torch, address, host, rates["host_to_device_gb_per_s"])
    except RuntimeError as error:
        failure = {"failure": _shorten(error)}
        return {"copies": failure, "link": failure}
    return {"copies": {"model": model, "is_near": is_near, **rates}, "link": link}


def measure_copies(
    host: Tensor,
    buffers: tuple[Tensor, Tensor],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return how many GB/s (1e9) are copied each way, the best of some rounds.

    Args:
        host: In the host's memory.
        buffers: Two of one size in a GPU's memory, none smaller than ``host``.
        wait: Returns when all copies have ended.
        clock: Seconds, from any beginning.

    Returns:
        ``host_to_device_gb_per_s``, ``device_to_host_gb_per_s``; and
        ``device_memory_gb_per_s``, which counts what is read and what is written.
    """
    source, target = buffers
    part = source[: host.numel()]

    def rate(to: Tensor, of: Tensor) -> float:
        def copy_some() -> None:
            for _ in range(_NUM_IN_ROUND):
                to.copy_(of, non_blocking=True)
            wait()

        best_s = _time_best(copy_some, clock)
        return round(_NUM_IN_ROUND * of.nbytes / best_s / 1e9, 3)

    return {
        "host_to_device_gb_per_s": rate(part, host),
        "device_to_host_gb_per_s": rate(host, part),
        "device_memory_gb_per_s": 2 * rate(target, source),
    }


def _time_best(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds of the quickest of some runs, after some that do not count."""
    begun_s = now_s = clock()
    while now_s < begun_s + _WARM_UP_S:
        run()
        now_s = clock()
    taken: list[float] = []
    begun_s = now_s
    while len(taken) < _MIN_ROUNDS or now_s < begun_s + _ROUNDS_S:
        before_s = clock()
        run()
        now_s = clock()
        taken.append(now_s - before_s)
    return min(taken)


@contextmanager
def _pinned(torch: Torch) -> Generator[Tensor]:
    """Give memory of the host that GPUs copy by themselves; on this thread's side.

    torch's own pinned memory is kept for whoever asks next, who may be elsewhere.
    Nobody has touched this one: its pages are chosen when it is pinned.
    """
    memory = torch.empty(HOST_BYTES, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(f"the host's memory cannot be pinned: CUDA's error {code}")
    try:
        yield memory
    finally:
        try:
            # What the GPU copied to is free only when it has ended.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        finally:
            runtime.cudaHostUnregister(memory.data_ptr())


def _measure_gpu(torch: Torch, host: Tensor) -> dict[str, float]:
    source, target = (
        torch.zeros(DEVICE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    return measure_copies(host, (source, target), torch.cuda.synchronize)


def _read_link(
    torch: Torch, address: str, host: Tensor, rate_gb_per_s: float
) -> dict[str, Value] | None:
    num_copies = math.ceil(_LOAD_S * rate_gb_per_s * 1e9 / host.nbytes)

    def load() -> Callable[[], bool]:
        target = torch.empty_like(host, device="cuda")
        for _ in range(min(num_copies, _MAX_LOAD)):
            target.copy_(host, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        return lambda: not end.query()

    try:
        link = read_under_load(address, load)
    except (UnreadableError, RuntimeError) as error:
        return {"failure": _shorten(error)}
    return None if link is None else {"address": address, **link}


def _shorten(error: Exception) -> str:
    # CUDA's errors go on with advice for programmers.
    return str(error).partition("\n")[0][:_MAX_SAID_CHARS]
