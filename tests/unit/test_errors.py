"""Errors that are kept and raised again."""

import pytest

from ronde.errors import Failure, HostError, HostFailure, fresh


def test_a_fresh_error_is_like_the_first() -> None:
    failures = [HostFailure("a", Failure("key refused", "ssh-copy-id a"))]
    first = HostError("hosts failed", failures, ["b"])
    first.__cause__ = OSError(2, "gone")
    first.add_note("on rank 1")
    for _ in range(3):
        with pytest.raises(HostError, match="hosts failed") as caught:
            raise fresh(first)
        again = caught.value
        assert again is not first
        assert (again.failures, again.ready) == (first.failures, first.ready)
        assert again.__cause__ is first.__cause__
        assert again.__notes__ == ["on rank 1"]
        again.add_note("mine")
    assert first.__traceback__ is None
