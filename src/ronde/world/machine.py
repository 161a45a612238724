"""Which machine this is, as far as processes on it can agree by themselves."""

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def boot_identity() -> str:
    """Return what is the same for all processes of one boot of one kernel.

    Some sandboxes do not show it; there it is the host's name.
    """
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def network_identity() -> str:
    """Return what is the same for two processes on one machine, and else differs.

    A container with a network of its own counts as a machine: it has own addresses.
    """
    try:
        space = str(_NETWORK.stat().st_ino)
    except OSError:
        # As above; of such a sandbox the whole is one.
        space = os.uname().nodename
    return f"{boot_identity()}/{space}"
