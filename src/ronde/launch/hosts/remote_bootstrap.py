"""The first program that runs on another host; its text arrives on standard input.

It runs on any Python since 3.6, so that a Python that is too old can still report its
version.
"""

import json
import os
import sys
from pathlib import Path

_EXIT_CANNOT = 3
_MAX_ERROR_CHARS = 500
_FIRST_MESSAGE_S = 60.0


def bootstrap(sentinel: str, directory: str) -> None:
    """Write the sentinel and this host's versions, then run an agent if possible."""
    if Path(directory, "ronde", "launch", "agent", "agent.py").is_file():
        sys.path.append(directory)
    else:
        import site

        site.main()
    agent, version, import_error = None, "", ""
    try:
        import ronde
        from ronde.launch.agent import agent

        version = ronde.__version__
    except Exception as error:  # noqa: BLE001 - it is reported
        import_error = "{}: {}".format(type(error).__name__, error)[:_MAX_ERROR_CHARS]  # noqa: UP032
    found = {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "executable": sys.executable,
        "ronde": version,
        "import_error": import_error,
    }
    os.write(1, (sentinel[::-1] + json.dumps(found) + "\n").encode())
    if import_error or agent is None:
        sys.exit(_EXIT_CANNOT)
    agent.main(_FIRST_MESSAGE_S)
