"""Variables that a feature may ask for by name; nobody is shown the others."""

import os
from collections.abc import Mapping, Sequence


def select_variables(
    names: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that are set, sorted, out of those that are asked for.

    Args:
        names: Names; one that ends in ``*`` stands for all that begin so.
        environ: The variables; None reads this process's own.
    """
    if environ is None:
        # Reading it here is this module's purpose; everybody else is given a mapping.
        environ = os.environ  # noqa: TID251
    prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
    return {
        name: environ[name]
        for name in sorted(environ)
        if name in names or name.startswith(prefixes)
    }
