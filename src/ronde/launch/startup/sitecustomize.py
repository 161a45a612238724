# ruff: noqa: INP001 - a directory of PYTHONPATH is no package
"""Prepares every Python of a rank for what its agent may want of it.

It writes its stacks where the agent reads them, when asked. A rank that can initialise
MPI and is about to fail ends without MPI_Finalize, which waits for all ranks.

An agent puts this directory first on its ranks' ``PYTHONPATH``: Python imports
``sitecustomize`` when it starts. Then it makes way for the one that would have been
imported without it. It costs one look-up and three system calls.
"""

import faulthandler
import os
import sys
from types import ModuleType


def _register(asked_by: str) -> None:
    number, _, path = asked_by.partition(",")
    try:
        # Opened anew: an inherited descriptor could be another file by now.
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(int(number), file=fd, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        # Another user, or a container: its agent then says what the kernel shows.
        return


def _end_mpi_where_all_is_well() -> None:
    try:
        import mpi4py
    except ImportError:
        return
    if mpi4py.rc.finalize is not None:
        # The user has said what he wants.
        return
    import atexit
    from importlib.util import module_from_spec, spec_from_file_location

    mpi4py.rc.finalize = False
    # By its path and under its name: ronde need not be installed, and may be.
    name = "ronde.world.exit_code"
    path = __file__.rpartition("/launch/startup/")[0] + "/world/exit_code.py"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    exit_code = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(exit_code)
    exit_code.watch_exit()
    atexit.register(_finalize, mpi4py, exit_code)


def _finalize(mpi4py: ModuleType, exit_code: ModuleType) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi4py.rc.initialize or exit_code.is_failing():
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


_register(os.environ.get("RONDE_STACKS", ""))  # noqa: TID251 - it must import nothing
if "PMIX_RANK" in os.environ:  # noqa: TID251
    _end_mpi_where_all_is_well()

sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]  # noqa: PTH120
del sys.modules[__name__]
# Without one it fails as it would have failed without this.
__import__(__name__)
