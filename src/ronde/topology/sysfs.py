"""Read this machine, with the distances between its GPUs and network ports."""

from collections.abc import Mapping
from pathlib import Path

from ronde.topology.kernel_files import list_names
from ronde.topology.machine import (
    Machine,
    NearPort,
    read_cores,
    read_cpu_limit,
    read_gpus,
    read_interface_rates,
)
from ronde.topology.pci import read_path


def read_machine(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> Machine:
    """Return the resources of this machine that the process may use."""
    # No driver is asked: one that hangs would take a start with it.
    top = str(root).rstrip("/")
    gpus, near = read_gpus(top, environ or {}), tuple[NearPort, ...]()
    bus_ids = {gpu.bus_id for gpu in gpus if gpu.bus_id}
    kinds = [f"{top}/sys/class/{kind}" for kind in ("net", "infiniband")]
    ports = (f"{kind}/{name}" for kind in kinds for name in list_names(kind))
    if bus_ids and any(map(read_path, ports)):
        # Imported only when needed, so that other starts are quick.
        from ronde.topology.placement.plan import find_near_ports
        from ronde.topology.probes.sysfs import read_host

        near = find_near_ports(read_host(root), bus_ids)
    rates = read_interface_rates(top)
    return Machine(read_cores(top), read_cpu_limit(top), gpus, rates, near)
