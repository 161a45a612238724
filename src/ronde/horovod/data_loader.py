"""Batches that a thread reads ahead."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

_logger = logging.getLogger("ronde")
_LOOK_INTERVAL_S = 0.1


class BaseDataLoader:
    """Gives batches, which a subclass defines by ``_iterate`` and ``__len__``."""

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
    """Has a thread read ahead; stands before a ``BaseDataLoader`` among the bases.

    It goes on from epoch to epoch until ``close_async_loader``. An iteration that is
    broken off is taken up by the next one. With ``async_loader_queue_size`` 0 there is
    no thread; ``debug_data_loader`` logs each batch.
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
        """End the thread; what it has read ahead is dropped."""
        self.finished_event.set()
        if self.started:
            self.thread.join()
        with suppress(Empty):
            while True:
                self.queue.get_nowait()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self._take()) is not None:
            yield self._process_batch(batch)

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():
                    if not self._offer(batch):
                        return
                self._offer(None)
        except Exception as error:  # noqa: BLE001  a thread's outermost line
            self._offer(error)

    def _offer(self, item: Any) -> bool:  # noqa: ANN401  a batch
        """Put an item where ``__iter__`` finds it; False when all is over."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=_LOOK_INTERVAL_S)
            except Full:
                continue
            if self.debug_data_loader:
                _logger.info("%d batches are read ahead.", self.queue.qsize())
            return True
        return False

    def _take(self) -> Any:  # noqa: ANN401  a batch
        """Return the next batch, None at the end of an epoch or of all."""
        while not self.finished_event.is_set():
            try:
                item = self.queue.get(timeout=_LOOK_INTERVAL_S)
            except Empty:
                if not self.thread.is_alive():
                    return None
                continue
            if isinstance(item, Exception):
                raise item
            return item
        return None
