"""This machine, as the kernel shows it in /proc and /sys."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ronde.topology.machine import (
    Gpu,
    Machine,
    NearPort,
    Nic,
    read_cores,
    read_cpu_limit,
    read_gpus,
    read_nics,
)


def read_machine(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> Machine:
    """Return what this process may use of the machine; it asks no driver.

    What cannot be read is left out or unknown, and is never an error: a driver that
    hangs would take a start with it, and sandboxes hide much.
    """
    top = str(root).rstrip("/")
    gpus, nics = read_gpus(top, environ or {}), read_nics(top)
    return Machine(
        cores=read_cores(top),
        cpu_limit=read_cpu_limit(top),
        gpus=gpus,
        nics=nics,
        near=_read_near(root, gpus, nics),
    )


def _read_near(
    root: Path, gpus: Sequence[Gpu], nics: Sequence[Nic]
) -> tuple[NearPort, ...]:
    bus_ids = {gpu.bus_id for gpu in gpus if gpu.bus_id}
    if not bus_ids or not any(nic.path for nic in nics):
        return ()
    # Imported where there is something to judge: elsewhere a start must not wait.
    from ronde.topology.placement.plan import find_near_ports
    from ronde.topology.probes.sysfs import read_host

    return find_near_ports(read_host(root), bus_ids)
