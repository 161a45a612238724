"""The addresses of the host that an agent runs on."""

from ronde.addresses import InterfaceAddress, read_interfaces

__all__ = ["InterfaceAddress", "read_interfaces"]
