"""``ronde`` as a backend of ``torch.distributed``.

Note [Groups written in Python]
    If the creator of a backend returns a ``ProcessGroup``, torch drops the group that
    it has begun to make and uses this one for all devices. C++ calls some of its
    methods, by the names of torch 2.13 and earlier; the others are called from Python
    only.

    DDP and comm hooks wait for futures. C++ waits for them without Python, so they must
    be complete by then. A thread that completes them would start the collectives of
    hooks in a different order on each rank. Instead they are completed in order at the
    end of backward: the engine calls ``FutureQueue.run``, before DDP's own callback.
"""

from ronde.process_group.attendance import Attendance, SideStore
from ronde.process_group.creation import GroupOptions
from ronde.process_group.group import RondeProcessGroup

__all__ = ["Attendance", "GroupOptions", "RondeProcessGroup", "SideStore"]
