# ruff: noqa: INP001 - a directory of PYTHONPATH is no package
"""Has every Python of a rank write its stacks where its agent reads them, when asked.

An agent puts this directory first on its ranks' ``PYTHONPATH``: Python imports
``sitecustomize`` when it starts. Then it makes way for the one that would have been
imported without it. It costs one look-up and three system calls.
"""

import faulthandler
import os
import sys

_number, _, _path = os.environ.get("RONDE_STACKS", "").partition(",")  # noqa: TID251 - it must import nothing
try:
    # Opened anew: an inherited descriptor could be another file by now.
    _fd = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(int(_number), file=_fd, all_threads=True)
except (OSError, ValueError, RuntimeError):
    # Another user, or a container: its agent then says what the kernel shows.
    pass

sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]  # noqa: PTH120
del sys.modules[__name__]
# Without one it fails as it would have failed without this.
__import__(__name__)
