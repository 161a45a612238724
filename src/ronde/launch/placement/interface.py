"""An address of a host, and the network interface that has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """One numeric address of one interface.

    Attributes:
        interface: ``eth0``.
        address: IPv4 or IPv6, without a scope; never loopback.
        prefix_length: Bits of its network.
    """

    interface: str
    address: str
    prefix_length: int
