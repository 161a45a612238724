"""Checkpoints of an elastic training: what is left when one cannot be written."""

import resource
from contextlib import contextmanager

import torch

from ronde.torch.elastic import Checkpoints


@contextmanager
def full_disk():
    """Let no file become longer than a page."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def state_of(step):
    return {"step": step, "weights": torch.full((10_000,), float(step))}


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_full_disk_leaves_the_last_ones_and_a_warning(tmp_path, caplog):
    checkpoints = Checkpoints(str(tmp_path), 10)
    with full_disk():
        checkpoints.write(10, state_of(10))
    assert f"checkpoint of step 10 to {tmp_path}: File too" in caplog.text
    assert "The newest complete checkpoint: none." in caplog.text
    assert names_in(tmp_path) == []

    checkpoints.write(20, state_of(20))
    caplog.clear()
    with full_disk():
        checkpoints.write(30, state_of(30))
    assert "Could not write the checkpoint of step 30" in caplog.text
    assert "The newest complete checkpoint: step-20.pt." in caplog.text
    assert names_in(tmp_path) == ["step-20.pt"]
    assert checkpoints.read_newest()["step"] == 20


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    left = tmp_path / "step-10.123.draft"
    left.write_bytes(b"half")
    checkpoints = Checkpoints(str(tmp_path), 10)
    for step in (20, 30, 40):
        checkpoints.write(step, state_of(step))
    assert names_in(tmp_path) == ["step-30.pt", "step-40.pt"]
