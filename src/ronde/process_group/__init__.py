"""``ronde`` as a backend of ``torch.distributed``.

Note [How torch takes a group in Python]
    A backend is what its creator returns. If that is a ``ProcessGroup``, torch drops
    the group of its own that it has begun, with all its backends, and takes this one
    for all devices. C++ calls some of its methods, by the names of torch 2.13 and those
    before; the others are called from Python only.

    What DDP waits for, and comm hooks, are futures. C++ waits for those without Python,
    so they must be over by then. A thread for that would call what hooks start in
    another order on every rank. Instead they are completed in order when backward ends:
    the engine calls ``Drain.run`` then, before DDP's own callback.
"""

from ronde.process_group.creation import GroupOptions
from ronde.process_group.group import RondeProcessGroup

__all__ = ["GroupOptions", "RondeProcessGroup"]
