"""Commands of ``ronde``, run in the process of the test."""

import pytest

from ronde.cli import main

EXIT_USAGE = 64


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return why a command line is refused, in one sentence."""
    capsys.readouterr()
    assert main(words) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    return err.removeprefix("ronde: ")
