"""A host as the user names it."""

from dataclasses import dataclass, field

SLOTS_OPEN = -1
"""Nobody said how many: the host's GPUs, else its cores where it is alone, else 1."""

SLOTS_GPUS = -2
"""As many as the host has GPUs, and it must have one."""

SLOTS_CORES = -3
"""As many as the host has cores."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that ranks may run on.

    Attributes:
        name: Host name or numeric address, as ssh is given it and as it is shown.
        slots: Ranks that it takes; 0 for a host that is kept out, ``SLOTS_OPEN`` where
            nobody said, or another of the negative ones above.
        user: Whom to log in as, or empty.
        port: Of its ssh, 0 for ssh's own choice.
        address: Numeric address that the ranks are to use, or empty.
        gpus: GPUs that its ranks may use, as ``CUDA_VISIBLE_DEVICES`` has them; empty
            for all.
        labels: What the host file says of it besides.
        said_at: Where it is named, for messages: ``hosts.txt line 3``.
    """

    name: str
    slots: int = SLOTS_OPEN
    user: str = ""
    port: int = 0
    address: str = ""
    gpus: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict[str, str])
    said_at: str = ""
