"""Horovod's timeline calls, on ranks of their own."""

import gzip
import json
import logging.handlers
import threading
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks_bare
from tests.unit.timeline_samples import check_events, read_events

import ronde.torch as hvd
from ronde.errors import NotInitializedError
from ronde.trace import read_part_files

DYNAMIC = {"HOROVOD_TIMELINE": "DYNAMIC"}


def names_of(text):
    return {e["args"].get("tensor") for e in read_events(text) if "args" in e}


def reduce_twice(info, path):
    hvd.init()
    texts = []
    for number in range(2):
        own = Path(f"{path}.{number}" if hvd.rank() == 0 else f"{path}.other")
        hvd.start_timeline(str(own), mark_cycles=number == 0)
        for _ in range(5):
            hvd.allreduce(torch.ones(3), name=f"x{number}")
        hvd.stop_timeline()
        if hvd.rank() == 0:
            texts.append(own.read_text())
        hvd.barrier()
    hvd.stop_timeline()
    hvd.shutdown()
    return texts


def test_a_timeline_holds_all_ranks_when_it_is_stopped(tmp_path):
    size = 3
    texts, *_ = run_ranks_bare(
        size, reduce_twice, tmp_path / "t.json", environment=DYNAMIC
    )
    for number, text in enumerate(texts):
        assert "start_time_since_epoch_in_micros" in text
        assert "NEGOTIATE_ALLREDUCE" in text
        assert ("CYCLE_START" in text) == (number == 0)
        spans = check_events(read_events(text))
        done = [e for e in spans if "fused" in e.get("args", {})]
        assert {e["args"]["tensor"] for e in done} == {f"allreduce.x{number}"}
        assert [sum(e["pid"] == rank for e in done) for rank in range(size)] == (
            [5] * size
        )
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["t.json.0", "t.json.1"]


def reduce_under_way(info, path):
    hvd.init()
    hvd.allreduce(torch.ones(3), name="test_allreduce")
    words = ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "CYCLE_START")
    while hvd.rank() == 0 and not all(w in Path(path).read_text() for w in words):
        pass
    if hvd.rank() == 0:
        json.loads(Path(path).read_text())
    hvd.barrier()
    hvd.shutdown()


def test_a_path_in_the_environment_is_written_while_the_job_runs(tmp_path):
    path = tmp_path / "t.json.gz"
    run_ranks_bare(
        2,
        reduce_under_way,
        path,
        environment={
            "HOROVOD_TIMELINE": str(path),
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        },
    )
    spans = check_events(read_events(gzip.decompress(path.read_bytes())))
    assert {e["pid"] for e in spans} == {0, 1}
    assert list(tmp_path.iterdir()) == [path]


def train_and_report(info):
    handler = logging.handlers.BufferingHandler(99)
    logging.getLogger("ronde").addHandler(handler)
    hvd.init()
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return total, [each.getMessage() for each in handler.buffer]


def test_a_path_that_cannot_be_written_is_a_warning(tmp_path):
    environment = {"HOROVOD_TIMELINE": str(tmp_path / "missing" / "t.json")}
    first, second = run_ranks_bare(2, train_and_report, environment=environment)
    words = f"Cannot write HOROVOD_TIMELINE={tmp_path}"
    assert (first[0], second) == (2.0, (2.0, []))
    assert [message.startswith(words) for message in first[1]] == [True]
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob("*.parts"))


def begin_again_and_again(info):
    held = []
    for _ in range(8):
        hvd.init()
        hvd.allreduce(torch.ones(3), name="x")
        hvd.shutdown()
        num_files = len(list(Path("/proc/self/fd").iterdir()))
        held.append((num_files, threading.active_count()))
    return held


def test_sessions_that_record_leave_nothing_open(tmp_path):
    path = tmp_path / "t"
    environment = {"RONDE_TIMELINE": str(path)}
    both = run_ranks_bare(2, begin_again_and_again, environment=environment)
    for held in both:
        # One more in each session would be five; the engine's own come and go.
        assert held[-1][0] <= held[2][0] + 2, held
        assert held[-1][1] <= held[2][1], held
    tracks = read_part_files([path])
    headers = [(t.header.session, t.header.rank) for t in tracks]
    assert headers == [(number, rank) for number in range(8) for rank in range(2)]
    assert all(track.is_whole and track.operations for track in tracks)


def call_wrongly(info, path):
    for call in (lambda: hvd.start_timeline(path), hvd.stop_timeline):
        with pytest.raises(NotInitializedError, match="has not been initialized"):
            call()
    hvd.init()
    words = "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
    with pytest.raises(ValueError, match=f"^{words}$"):
        hvd.start_timeline(path)
    hvd.stop_timeline()
    hvd.shutdown()


def start_nowhere(info, path):
    hvd.init()
    with pytest.raises(FileNotFoundError):
        hvd.start_timeline(path)
    hvd.shutdown()


def test_calls_that_cannot_be_raise_what_horovod_raises(tmp_path):
    run_ranks_bare(1, call_wrongly, str(tmp_path / "t.json"))
    nowhere = str(tmp_path / "no" / "t.json")
    run_ranks_bare(1, start_nowhere, nowhere, environment=DYNAMIC)


def lose_the_directory(info, path):
    heard = []
    handler = logging.Handler()
    handler.emit = lambda entry: heard.append(entry.getMessage())
    logging.getLogger("ronde").addHandler(handler)
    Path(path).parent.mkdir(exist_ok=True)
    hvd.init()
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(3), name="x")
    parts = Path(f"{path}.parts")
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()
    Path(path).unlink()
    Path(path).parent.rmdir()
    hvd.stop_timeline()
    hvd.shutdown()
    return heard


def test_a_timeline_that_is_lost_does_not_end_the_job(tmp_path):
    path = str(tmp_path / "gone" / "t.json")
    ((warning,),) = run_ranks_bare(1, lose_the_directory, path, environment=DYNAMIC)
    assert "cannot merge the records of rank 0" in warning
