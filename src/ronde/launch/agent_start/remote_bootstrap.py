"""What another host runs first, as text that it gets over standard input.

It stands alone, for ronde may not be there, and any Python from 3.6 on can run it, so
that one which is too old can say so.
"""

import json
import os
import sys
from pathlib import Path

_EXIT_CANNOT = 3
_MOST_SAID = 500
_FIRST_WORD_S = 60.0


def arrive(sentinel: str, directory: str) -> None:
    """Say what is here, after the sentinel; then be an agent, where that can be."""
    if Path(directory, "ronde", "launch", "agent", "agent.py").is_file():
        sys.path.append(directory)
    else:
        import site

        site.main()
    agent, version, problem = None, "", ""
    try:
        import ronde
        from ronde.launch.agent import agent

        version = ronde.__version__
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        problem = "{}: {}".format(type(error).__name__, error)[:_MOST_SAID]  # noqa: UP032
    said = {
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "executable": sys.executable,
        "ronde": version,
        "problem": problem,
    }
    os.write(1, (sentinel[::-1] + json.dumps(said) + "\n").encode())
    if problem or agent is None:
        sys.exit(_EXIT_CANNOT)
    agent.main(_FIRST_WORD_S)
