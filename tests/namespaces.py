"""Whether this machine lets programs run in namespaces of their own."""

import subprocess
from collections.abc import Sequence


def why_not(words: Sequence[str]) -> str:
    """Say why no program can be run behind these words; nothing where one can.

    Many a container's root may not make namespaces, and some kernels let nobody else.

    Args:
        words: ``unshare`` with its options, and what prepares the place.
    """
    try:
        tried = subprocess.run(
            [*words, "true"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"no namespaces of one's own here: {error}"
    if tried.returncode == 0:
        return ""
    return f"no namespaces of one's own here: {tried.stderr.strip()}"
