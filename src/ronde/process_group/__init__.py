"""``ronde`` as a backend of ``torch.distributed``.

Note [Groups written in Python]
    If the creator of a backend returns a ``ProcessGroup``, torch drops the group that
    it has begun to make and uses the returned one for all devices. C++ calls some of
    its methods, by the names of torch 2.13 and earlier; only Python calls the others.

    DDP and comm hooks wait for futures. C++ waits without running Python, so futures
    must be complete by then. If a thread completed them, hooks would start collectives
    in a different order on each rank. Instead, futures are completed in order at the
    end of backward: the engine calls ``FutureQueue.run`` before DDP's own callback.
"""

from ronde.process_group.attendance import Attendance, SideStore
from ronde.process_group.creation import GroupOptions
from ronde.process_group.group import RondeProcessGroup

__all__ = ["Attendance", "GroupOptions", "RondeProcessGroup", "SideStore"]
