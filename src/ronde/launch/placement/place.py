"""What one rank has of its host."""

from dataclasses import dataclass, field

from ronde.topology.machine import UNKNOWN_NODE


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank sits.

    Attributes:
        num_cores: Physical cores that it may count on, for its threads.
        cpus: Hardware threads that it is bound to; empty for none in particular.
        memory_node: Where its memory is to lie, or ``UNKNOWN_NODE``.
        env: Variables that name its devices.
        device: Its device, for people; empty for none.
        nic: The nearest network interface, for people; empty where that is not known.
        why: The reason for all that, for people.
    """

    num_cores: int
    cpus: tuple[int, ...] = ()
    memory_node: int = UNKNOWN_NODE
    env: dict[str, str] = field(default_factory=dict[str, str])
    device: str = ""
    nic: str = ""
    why: str = ""
