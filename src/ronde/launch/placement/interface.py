"""An address of a host, and the network interface that has it."""

from ronde.addresses import InterfaceAddress

__all__ = ["InterfaceAddress"]
