"""Find the hosts of a command, from its options or from Slurm's allocation."""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.arguments import (
    attribute_of,
    one_of,
    read_nodes,
    require_alone,
    whole_number,
)
from ronde.errors import UsageError
from ronde.launch.host import MAX_SLOTS, SLOTS_OPEN, Host, is_here

if TYPE_CHECKING:
    from ronde.launch.hosts.spawner import Spawner

DISCOVERIES = ("--host-discovery", "--host-discovery-script")
ELASTIC_OPTIONS = (
    *("--spares", "--discover-every", "--failure-domain", "--cooldown"),
    *("--reform-timeout", "--notice"),
)
"""Options that only elastic jobs have."""
_SOURCES = ("--hosts", "--hostfile", *DISCOVERIES)
HOST_DEFAULTS = {"launcher": "auto", "python": sys.executable}
HOST_TYPES = {
    "--slots": whole_number(1, MAX_SLOTS),
    "--launcher": one_of("auto", "ssh", "slurm"),
}


class HorovodOptions(NamedTuple):
    """horovodrun's options from the command line of ``ronde run``."""

    env: Mapping[str, str] = MappingProxyType({})  # variables for all ranks
    elastic: Mapping[str, Any] = MappingProxyType({})  # options of elastic jobs
    ssh_port: int = 0  # 0 for ssh's default
    ssh_args: tuple[str, ...] = ()
    output_dir: str = ""  # directory for the ranks' output, or empty
    ignored: tuple[str, ...] = ()  # options that have no effect


def find_run_hosts(
    options: argparse.Namespace, environ: Mapping[str, str], ssh_port: int
) -> tuple[Host, ...]:
    """Return the hosts of a command, limited by ``--standalone`` and ``--nodes``."""
    hosts = find_hosts(options, {} if options.standalone else environ)
    if ssh_port:
        # With a port, this machine would count as another one.
        own = next((host for host in hosts if is_here(host)), None)
        hosts = tuple(
            host if host is own else host._replace(port=host.port or ssh_port)
            for host in hosts
        )
    if options.standalone:
        for host in hosts:
            if not is_here(host):
                raise UsageError(
                    "--standalone and horovod.run() start ranks on this machine only, "
                    f"got the host {host.name}. Start the program on several hosts "
                    "with: ronde run -H a:4,b:4 python SCRIPT"
                )
    # With --listen and Ray, --nodes counts the nodes that join.
    if not options.nodes or options.listen or options.launcher == "ray":
        return hosts
    least, most = read_nodes(options.nodes)
    usable = [host for host in hosts if host.slots]
    if len(usable) < least:
        raise UsageError(
            f"--nodes must be at most {len(usable)}, the number of known hosts, got "
            f"{least}. Name all with -H, or let nodes join: --listen and --agent."
        )
    # With a range, further hosts may replace lost ones.
    return hosts if least < most else tuple(usable[:least])


def find_hosts(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Host, ...]:
    """Return the hosts that the options name, else Slurm's, else this machine."""
    require_alone(options, *_SOURCES)
    given = {name: getattr(options, attribute_of(name)) for name in _SOURCES}
    named = [name for name, value in given.items() if value is not None]
    slots = read_slots(options)
    hosts: Sequence[Host] | None = None
    if named:
        source, text = named[0], given[named[0]]
        # Imported here: most jobs start without it.
        from ronde.launch.hosts import sources

        if source in DISCOVERIES:
            hosts = _discover(text, source)
        elif source == "--hosts":
            hosts = sources.parse_hosts(text)
        else:
            hosts = sources.parse_hostfile(read_text(text, source), text)
    elif "SLURM_JOB_ID" in environ:
        from ronde.launch.hosts.sources import read_allocation

        hosts = read_allocation(environ)
    hosts = hosts or (Host(os.uname().nodename, named_at="this machine"),)
    if slots == SLOTS_OPEN:
        return tuple(hosts)
    is_unused = all(host.slots != SLOTS_OPEN for host in hosts)
    if named and is_unused and named[0] not in DISCOVERIES:
        raise UsageError(
            f"--slots {slots} has no effect, as every host is given with its own "
            f"slots, such as {hosts[0].name}:{hosts[0].slots}. Drop one of the two."
        )
    return tuple(
        host._replace(slots=slots) if not named or host.slots == SLOTS_OPEN else host
        for host in hosts
    )


def _discover(text: str, option: str) -> tuple[Host, ...]:
    from ronde.launch.hosts import discovery, sources

    if not sources.is_hostfile(text, option):
        return discovery.discover(text, option)
    hosts = sources.parse_lines(read_text(text, option), text)
    return sources.merge_repeated(hosts, is_counted=True)[0]


def read_slots(options: argparse.Namespace) -> int:
    return SLOTS_OPEN if options.slots is None else options.slots


def read_text(path: str, option: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path!r}, given with {option}: {error}. Check the path."
        ) from None


def make_spawner(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    more_ssh_args: Sequence[str] = (),
) -> "Spawner":
    is_named = any(getattr(options, attribute_of(each)) for each in _SOURCES)
    is_in_slurm = "SLURM_JOB_ID" in environ
    is_chosen = options.launcher == "auto" and is_in_slurm and not is_named
    if options.launcher == "slurm" or is_chosen:
        if not is_in_slurm:
            raise UsageError(
                "--launcher slurm only works inside a Slurm allocation. "
                "Type: salloc -N 2 ronde run ..."
            )
        from ronde.launch.hosts.slurm import SlurmSpawner

        return SlurmSpawner()
    try:
        ssh_args = [word for text in options.ssh_args for word in shlex.split(text)]
    except ValueError as error:
        raise UsageError(
            f"--ssh-args must be in shell syntax, got {options.ssh_args[-1]!r}: "
            f"{error}. Close the quote."
        ) from None
    ssh_args += more_ssh_args
    from ronde.launch.hosts.ssh import SshSpawner

    return SshSpawner(ssh_args)
