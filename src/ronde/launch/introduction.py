"""What an agent says of its host, unasked and first."""

import os
from pathlib import Path

from ronde.addresses import read_interfaces
from ronde.launch.inherited import own_environment
from ronde.launch.messages import PROTOCOL, Hello
from ronde.topology.sysfs import read_machine
from ronde.world.machine import network_identity


def introduce() -> Hello:
    """Look at this host and return what the controller must know of it."""
    return Hello(
        protocol=PROTOCOL,
        host=os.uname().nodename,
        identity=network_identity(),
        pid=os.getpid(),
        directory=_directory(),
        machine=read_machine(environ=own_environment()),
        interfaces=read_interfaces(),
    )


def _directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""
