# ruff: noqa: INP001 - a directory of PYTHONPATH is no package
"""Makes every Python process of a rank write its stacks to its agent on a signal.

An agent puts this directory first on its ranks' ``PYTHONPATH``, since Python imports
``sitecustomize`` at startup. This module then imports the user's own ``sitecustomize``,
if any.
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
    # Another user, or a container: the agent shows the state in the kernel.
    pass

sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]  # noqa: PTH120
del sys.modules[__name__]
# Without another one it fails as usual.
__import__(__name__)
