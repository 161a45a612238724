"""The small modules of ``horovod`` that scripts import besides its front ends."""

import os
from itertools import islice
from threading import Event

import pytest
from tests.limits import HANG_S

from ronde.horovod import compatibility as util
from ronde.horovod.compatibility import (
    AsyncDataLoaderMixin,
    BaseDataLoader,
)
from ronde.horovod.launcher import get_env_rank_and_size, in_thread


class Numbers(BaseDataLoader):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def _iterate(self):
        yield from range(self.count)

    def _process_batch(self, batch):
        return 10 * batch


class NumbersAhead(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("ahead", [0, 1, 3, 64])
def test_every_epoch_has_all_batches(ahead: int) -> None:
    loader = NumbersAhead(async_loader_queue_size=ahead, count=5)
    assert [list(loader) for _ in range(3)] == [[0, 10, 20, 30, 40]] * 3
    assert len(loader) == 5
    loader.close_async_loader()
    assert not loader.thread.is_alive()


def test_an_epoch_that_is_broken_off_is_taken_up() -> None:
    loader = NumbersAhead(2, debug_data_loader=True, count=5)
    assert list(islice(loader, 2)) == [0, 10]
    assert list(loader) == [20, 30, 40]
    loader.close_async_loader()


@pytest.mark.parametrize("ahead", [1, 64])
def test_it_can_be_closed_while_nobody_takes(ahead: int) -> None:
    loader = NumbersAhead(ahead, count=1000)
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    assert list(loader) == []


def test_what_reading_raises_is_raised() -> None:
    class Broken(NumbersAhead):
        def _iterate(self):
            yield 1
            raise KeyError("mine")

    loader = Broken(4, count=1)
    batches = iter(loader)
    assert next(batches) == 10
    with pytest.raises(KeyError, match="mine"):
        next(batches)
    assert list(loader) == []


def test_a_function_in_a_thread() -> None:
    done = Event()
    in_thread(done.set).join(HANG_S)
    assert done.is_set()
    with pytest.raises(ValueError, match="args must be a tuple, got int"):
        in_thread(done.set, 1)  # pyright: ignore[reportArgumentType]


def test_the_environment_is_changed_for_a_while(monkeypatch) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.delenv("OTHER", raising=False)
    with util.env(ONE="2", OTHER="3", NONE=None):
        assert (os.environ["ONE"], os.environ["OTHER"]) == ("2", "3")  # noqa: TID251
        assert "NONE" not in os.environ  # noqa: TID251
    assert os.environ["ONE"] == "1"  # noqa: TID251
    assert "OTHER" not in os.environ  # noqa: TID251


def test_rank_and_size_by_any_launcher(monkeypatch) -> None:
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{prefix}_RANK", raising=False)
        monkeypatch.delenv(f"{prefix}_SIZE", raising=False)
    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(RuntimeError, match="only one of PMI_RANK and PMI_SIZE found"):
        get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "2")
    assert get_env_rank_and_size() == (1, 2)
    monkeypatch.setenv("HOROVOD_RANK", "3")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert get_env_rank_and_size() == (3, 4)


def test_versions_are_compared_as_such() -> None:
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.9.0")
    assert not util.is_version_greater_equal_than("1.9", "1.10.0")
    with pytest.raises(ValueError, match=r"target must be major\.minor\.patch"):
        util.is_version_greater_equal_than("1.9.0", "1.9")
