"""How readers say that a value in a file is not what it must be."""

from ronde.errors import UsageError
from ronde.plain_values import shorten


def bad_value(origin: str, line: int, rule: str, got: object) -> UsageError:
    """Return the error for a value that breaks a rule; raise it.

    Args:
        origin: What to call the file.
        line: Where the value stands, from 1.
        rule: What it must be: ``os_index must be a whole number``.
        got: What it is.
    """
    return UsageError(
        f"{origin}, line {line}: {rule}, got {shorten(got)}. Was it cut, or changed on "
        "its way?"
    )
