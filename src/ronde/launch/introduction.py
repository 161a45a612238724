"""What an agent says of its host, unasked and first."""

import os
from pathlib import Path

from ronde.addresses import read_interfaces
from ronde.launch.inherited import own_environment
from ronde.launch.messages import PROTOCOL, Hello
from ronde.topology.sysfs import read_machine


def introduce() -> Hello:
    """Look at this host and return what the controller must know of it."""
    return Hello(
        protocol=PROTOCOL,
        host=os.uname().nodename,
        identity=identify(),
        pid=os.getpid(),
        directory=_directory(),
        machine=read_machine(environ=own_environment()),
        interfaces=read_interfaces(),
    )


def identify() -> str:
    """Return what is the same for two agents on one machine, and else differs.

    A container with a network of its own counts as a machine: it has own addresses.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
