"""What Horovod's scripts ask about the build, which ronde answers for what is here."""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from typing import cast

import torch
from torch import distributed
from torch.cuda import nccl

from ronde.errors import UsageError
from ronde.torch.session import current_session, is_initialized
from ronde.world import Launcher

_LOAD_MPI = """
import sys
sys.path[:] = sys.argv[1:]
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
import mpi4py.MPI
"""


@cache
def mpi_built() -> bool:
    """Return whether mpi4py is installed and loads an MPI, so that it can move tensors.

    The first call takes 0.1 s: it tries that in a process of its own, because here it
    would initialise MPI, or take the choice from the program.
    """
    if "mpi4py.MPI" in sys.modules:
        return True
    if find_spec("mpi4py") is None:
        return False
    words = [sys.executable, "-I", "-c", _LOAD_MPI, *sys.path]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def mpi_enabled() -> bool:
    """Return whether MPI started this job or moves its tensors; False before init."""
    if not is_initialized():
        return False
    session = current_session()
    is_launcher = session.rank_info.launcher in (Launcher.OPEN_MPI, Launcher.PMI)
    return is_launcher or session.states[0].communicator.engine == "mpi"


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI; ``UsageError`` in a job without."""
    if not mpi_enabled():
        raise UsageError(
            "Horovod MPI is not enabled; Please make sure it's installed and enabled."
        )
    # Importing mpi4py.MPI starts MPI: who has not done that calls it from no thread.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is None or mpi.Query_thread() == mpi.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Return whether torch has Gloo."""
    return distributed.is_available() and distributed.is_gloo_available()


gloo_enabled = gloo_built


def nccl_built() -> int:
    """Return the version of torch's NCCL, such as 22304 for 2.23.4; 0 without it."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        return 0
    major, minor, patch = cast("tuple[int, ...]", nccl.version())[:3]
    return major * 10000 + minor * 100 + patch


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None
