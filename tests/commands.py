"""Commands of ``ronde``, run in the process of the test."""

import pytest

from ronde.cli import main

EXIT_USAGE = 64


def refusal(
    capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_USAGE
) -> str:
    """Return why a command line is refused."""
    capsys.readouterr()
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err.removeprefix("ronde: ")
