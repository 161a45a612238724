"""This process's own environment; one light module, since every agent needs it."""

import os


def own_environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    # Reading it here is this module's purpose; everybody else is given a mapping.
    return dict(os.environ)  # noqa: TID251
