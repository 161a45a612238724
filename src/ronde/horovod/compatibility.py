"""Functions and classes of Horovod's ``common`` and ``data`` modules."""

import logging
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from importlib.util import find_spec
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

from ronde import session
from ronde.errors import CollectiveError as HorovodInternalError
from ronde.session import HostsUpdatedInterrupt

__all__ = [
    "AsyncDataLoaderMixin",
    "BaseDataLoader",
    "HorovodBasics",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_version_mismatch_message",
    "gloo_built",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
]

_logger = logging.getLogger("ronde")
_POLL_INTERVAL_S = 0.1
_cache = cache
"""An alias that Horovod's own tests import."""


class HorovodVersionMismatchError(ImportError):
    """Raised if the framework's version differs from the build's; unused in ronde."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(
    name: str, version: str, installed_version: str
) -> str:
    """Return the message of ``HorovodVersionMismatchError``."""
    return (
        f"{name} must be the version that was built with, {installed_version}, got "
        f"{version}. Install that one, or build anew."
    )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for a framework that is installed and has a front end."""
    del verbose
    has_front_end = ext_base_name in ("torch", "tensorflow", "keras")
    return has_front_end and find_spec(ext_base_name) is not None


class HorovodBasics:
    """The functions of a session as methods; the constructor ignores its arguments."""

    def __init__(self, *args: object) -> None:
        del args

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a function's own
        if name.startswith("_"):
            raise AttributeError(f"HorovodBasics has no attribute {name!r}.")
        return getattr(session, name)


def _with_verbose(function: Any) -> Any:  # noqa: ANN401  of features
    @wraps(function)
    def built(verbose: bool = False) -> Any:  # noqa: ANN401  the function's own
        del verbose
        return function()

    return built


gloo_built = _with_verbose(session.gloo_built)
mpi_built = _with_verbose(session.mpi_built)
nccl_built = _with_verbose(session.nccl_built)
ddl_built = _with_verbose(session.ddl_built)
ccl_built = _with_verbose(session.ccl_built)


@contextmanager
def env(**kwargs: str | None) -> Generator[None]:
    """Set environment variables during a block; None leaves a variable unchanged."""
    values = {name: value for name, value in kwargs.items() if value is not None}
    environ = os.environ  # noqa: TID251  Horovod's function
    before = {name: environ[name] for name in values if name in environ}
    environ.update(values)
    try:
        yield
    finally:
        for name in values:
            environ.pop(name, None)
        environ.update(before)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return True if version ``ver`` is at least ``target`` (``major.minor.patch``)."""
    from packaging.version import Version

    if target.count(".") != 2:
        raise ValueError(
            f"target must be major.minor.patch, got {target!r}. Add zeros."
        )
    return Version(ver) >= Version(target)


class BaseDataLoader:
    """Base of data loaders; subclasses implement ``_iterate`` and ``__len__``."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _iterate(self) -> Iterable[Any]:
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:  # noqa: ANN401  the user's own
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin(BaseDataLoader):
    """Mixin that prefetches batches in a thread; list it before ``BaseDataLoader``.

    The thread loads epoch after epoch until ``close_async_loader``. There is no thread
    if ``async_loader_queue_size`` is 0. ``debug_data_loader`` logs each batch.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,  # noqa: ANN401  the next class's own
        **kwargs: Any,  # noqa: ANN401  the next class's own
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.finished_event = Event()
        self.queue: Queue[Any] = Queue(async_loader_queue_size)
        self.thread = Thread(target=self._async_worker, daemon=True)
        self.started = False

    def close_async_loader(self) -> None:
        """Stop the thread, and drop prefetched batches."""
        self.finished_event.set()
        while self.thread.is_alive() or not self.queue.empty():
            with suppress(Empty):
                self.queue.get(timeout=_POLL_INTERVAL_S)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self._next_batch()) is not None:
            yield self._process_batch(batch)

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    self.queue.put(batch)
                    if self.debug_data_loader:
                        _logger.info("%d batches are read ahead.", self.queue.qsize())
                    if self.finished_event.is_set():
                        return
                self.queue.put(None)
        except Exception as error:  # noqa: BLE001  a thread's outermost line
            self.queue.put(error)

    def _next_batch(self) -> Any:  # noqa: ANN401  the user's own
        """Return the next batch, or None at the end of an epoch or after closing."""
        while not self.finished_event.is_set():
            is_alive = self.thread.is_alive()  # first, so as not to miss a batch
            try:
                item = self.queue.get(timeout=_POLL_INTERVAL_S)
            except Empty:
                if not is_alive:
                    return None
                continue
            if isinstance(item, Exception):
                raise item
            return item
        return None
