"""Why ssh to a host stands still: large packets are lost on the way.

TCP connects and the server's first line comes, in small packets. The exchange of keys
has packets of full size, and never ends.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from ronde.addresses import interface_towards, own_mtu_towards
from ronde.errors import Failure
from ronde.launch.host import Host
from ronde.launch.path_mtu import LEAST_BYTES, measure_ssh_path

_ASK_S, _CONNECT_S = 2.0, 2.0
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


def explain_silence(host: Host, client: Sequence[str]) -> Failure | None:
    """Return why ssh connects to a host and goes no further, if that is found.

    ``client`` is ssh with its options.
    """
    with suppress(OSError, subprocess.SubprocessError):
        if (place := _find_server(host, client)) is not None:
            return _explain(place)
    return None


class _Place(NamedTuple):
    address: str
    port: int


def ask_settings(client: Sequence[str], name: str) -> tuple[str, str]:
    """Return ssh's settings for a host, a line each, and the names of their files.

    Its configuration may run commands. Those that hang are killed.

    Raises:
        OSError: There is no ssh.
        subprocess.SubprocessError: It failed, or took too long.
    """
    words = [*client, "-v", "-G", "--", name]
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as asked:
        try:
            settings, notes = asked.communicate(timeout=_ASK_S)
        except subprocess.TimeoutExpired:
            os.killpg(asked.pid, signal.SIGKILL)
            raise
    if asked.returncode:
        raise subprocess.CalledProcessError(asked.returncode, words)
    return settings, notes


def _find_server(host: Host, client: Sequence[str]) -> _Place | None:
    """Return where ssh would connect to; None behind a proxy, or if nothing listens."""
    printed, _ = ask_settings(client, host.name)
    lines = (line.partition(" ") for line in printed.splitlines())
    settings = {name: value for name, _, value in lines}
    proxies = (settings.get(f"proxy{way}", "none") for way in ("command", "jump"))
    if not settings.keys() >= {"hostname", "port"} or {*proxies} != {"none"}:
        return None
    name, port = settings["hostname"], int(settings["port"])
    family = _FAMILIES.get(settings.get("addressfamily", ""), socket.AF_UNSPEC)
    found = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM)
    for *_, address in found:
        place = _Place(str(address[0]), port)
        with suppress(OSError), socket.create_connection(place, _CONNECT_S):
            return place
    return None


def _explain(place: _Place) -> Failure | None:
    """Return what stops ssh; None where the server has not even begun to speak."""
    sizes = measure_ssh_path(*place)
    if sizes is None:
        return None
    name, mtu = interface_towards(place.address), own_mtu_towards(place.address)
    stands = "ssh connects, and stands still at the exchange of keys"
    if sizes.lost == 0:
        cause = f"packets of {sizes.arrived} bytes arrive there, those back may be lost"
        most = LEAST_BYTES
    else:
        cause = f"packets above {sizes.arrived} bytes to it are lost"
        most = sizes.arrived
    return Failure(
        f"{stands}: {cause}, and the MTU of {name} is {mtu}",
        f"ip link set dev {name} mtu {max(1280, most)}  # as root on this machine; or "
        f"give switches and tunnels between them {mtu}, and let ICMP 'too big' through",
    )
