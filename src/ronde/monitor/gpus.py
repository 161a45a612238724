"""The state of a host's GPUs, from NVML. Its calls may hang in the driver."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ronde.monitor.usage import GpuUsage
from ronde.topology.probes.nvml import NoNvmlError, open_nvml
from ronde.units import format_duration

T = TypeVar("T")

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
_MISSING = "nvidia-ml-py is not installed there: pip install 'ronde[monitor]'"
_OLD_S = 5.0
_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1  # of nvml.h
_THROTTLED = {
    0x04: "power cap",
    0x08: "HW slowdown",
    0x10: "sync boost",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake",
}
"""Reasons for reduced clocks by NVML's bit; an idle GPU is not throttled."""


class LatestReading(NamedTuple, Generic[T]):
    """The newest result of a reader; None before the first one."""

    value: T | None
    age_s: float  # without a result since the reader was made


class HangingReader(Generic[T]):
    """Calls a function that may never return, in a daemon thread.

    While one call hangs, no other begins; the process can end nevertheless.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._thread: threading.Thread | None = None
        self._newest: tuple[T | None, float] = None, time.monotonic()

    def latest(self, deadline_s: float) -> LatestReading[T]:
        """Start a call if none runs, await it until the deadline, return the newest."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._thread.join(deadline_s)
        value, at_s = self._newest
        return LatestReading(value, time.monotonic() - at_s)

    def _run(self) -> None:
        value = self._read()
        self._newest = value, time.monotonic()


class GpuReading(NamedTuple):
    """The GPUs of a host, and why some are missing: half a sentence, or no text."""

    gpus: tuple[GpuUsage, ...]
    problem: str


class GpuReader:
    """Reads the GPUs of this host; NVML stays open between the calls."""

    def __init__(self, root: str = "") -> None:
        self._drivers = [Path(f"{root}{path}") for path in _DRIVERS]
        self._nvml: Any = None
        self._reader = HangingReader(self._read)

    def read(self, deadline_s: float) -> GpuReading:
        """Return the newest state; it is older if NVML does not answer in time."""
        if not any(path.exists() for path in self._drivers):
            return GpuReading((), "")
        found, age_s = self._reader.latest(deadline_s)
        if found is None or age_s > _OLD_S:
            silence = f"NVML has not answered for {format_duration(age_s)}"
            return GpuReading(found.gpus if found else (), silence)
        return found

    def _read(self) -> GpuReading:
        if self._nvml is None:
            try:
                # Never closed: the driver needs seconds to start without a user.
                self._nvml = open_nvml().__enter__()
            except NoNvmlError as error:
                is_there = error.__cause__ is not None
                return GpuReading((), str(error) if is_there else _MISSING)
        nvml, gpus, problems = self._nvml, list[GpuUsage](), list[str]()
        try:
            num_gpus = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self._nvml = None  # such as after a restart of the driver
            return GpuReading((), f"NVML does not answer: {error}")
        for number in range(num_gpus):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                gpus.append(_read_gpu(nvml, number, handle))
            except nvml.NVMLError as error:
                problems.append(f"GPU {number} does not answer: {error}")
        return GpuReading(tuple(gpus), "; ".join(problems))


def _read_gpu(nvml: Any, number: int, handle: object) -> GpuUsage:  # noqa: ANN401
    """Read one GPU; raise ``NVMLError`` if it does not even have a name."""

    def ask(name: str, *given: object) -> Any:  # noqa: ANN401
        """Return an answer; None if the GPU, the driver or nvidia-ml-py has none."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *given)
        except (AttributeError, nvml.NVMLError, mismatch):
            return None

    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)

    title = nvml.nvmlDeviceGetName(handle)
    busy, milliwatts = ask("UtilizationRates"), ask("PowerUsage")
    # The newer struct does not count the driver's own memory as used.
    form = getattr(nvml, "nvmlMemory_v2", None)
    memory = ask("MemoryInfo", form) or ask("MemoryInfo")
    reasons = ask("CurrentClocksEventReasons")
    if reasons is None:  # before release 535
        reasons = ask("CurrentClocksThrottleReasons") or 0
    return GpuUsage(
        number=number,
        name=title.decode() if isinstance(title, bytes) else title,
        utilization=busy.gpu / 100 if busy else None,
        memory_bytes=int(memory.used) if memory else None,
        total_memory_bytes=int(memory.total) if memory else None,
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=ask("Temperature", _TEMPERATURE_OF_GPU),
        clock_mhz=ask("ClockInfo", _CLOCK_OF_SM),
        max_clock_mhz=ask("MaxClockInfo", _CLOCK_OF_SM),
        throttled_by=tuple(text for bit, text in _THROTTLED.items() if reasons & bit),
        pids=tuple(int(each.pid) for each in ask("ComputeRunningProcesses") or ()),
    )
