"""Facts of a host's network: its own name, its interfaces and its RDMA ports."""

from ronde.check.facts import ENVIRONMENT, Reading
from ronde.check.probes.network_interfaces import read_interfaces, read_variables
from ronde.check.probes.network_names import OwnName
from ronde.check.probes.network_rdma import (
    has_library,
    read_adapters,
    read_device_files,
    read_errors,
    read_ports,
)


def read(reading: Reading) -> None:
    """Take down facts ``network.``; a name server that hangs costs two seconds."""
    root = str(reading.settings.get("root", "/")).rstrip("/")
    own_name = OwnName.look_up(root)
    reading.keep("network.interfaces", lambda: read_interfaces(root))
    forwarded = reading.settings.get(ENVIRONMENT, {})
    reading.keep("network.variables", lambda: read_variables(root, forwarded))
    reading.keep("network.uptime_s", lambda: read_uptime_s(root))
    reading.keep("network.rdma_adapters", lambda: read_adapters(root))
    reading.keep("network.rdma_ports", lambda: read_ports(root))
    reading.keep("network.rdma_errors", lambda: read_errors(root))
    reading.keep("network.rdma_device_files", lambda: read_device_files(root))
    if reading.values.get("network.rdma_adapters"):
        reading.keep("network.has_rdma_library", lambda: has_library(root))
    reading.keep("network.own_name", own_name.wait)


def read_uptime_s(root: str) -> float:
    """Return for how many seconds the kernel has been running."""
    with open(f"{root}/proc/uptime", encoding="ascii") as file:  # noqa: PTH123
        return float(file.read().split()[0])
