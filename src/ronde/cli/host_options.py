"""Which hosts a job runs on: the options for that, and Slurm's allocation."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ronde.errors import UsageError
from ronde.launch.hosts.host import SLOTS_OPEN, Host

_SOURCES = ("hosts", "hostfile", "host-discovery-script")


def add_host_options(
    parser: argparse.ArgumentParser, *, is_for_ranks: bool = False
) -> None:
    """Add the options that name hosts."""
    add = parser.add_argument_group("hosts").add_argument
    add(
        *("-H", "--hosts"),
        metavar="HOSTS",
        help="hosts and their slots, as a:4,b:4 or gpu[01-16]:8; without a "
        "number one slot per GPU, else one, or one per core of the only "
        "host (default: Slurm's allocation, else this machine)",
    )
    add(
        *("--hostfile", "-hostfile"),
        metavar="FILE",
        help="file with one host per line, as a slots=4; the formats of Horovod, "
        "Open MPI, MPICH and DeepSpeed work too",
    )
    add(
        "--host-discovery-script",
        metavar="COMMAND",
        help="command that prints such lines; it runs once",
    )
    add(
        *("--slots", "--slots-per-host"),
        metavar="N",
        help="slots of each host that names none",
    )
    if not is_for_ranks:
        return
    add(
        *("--nodes", "--nnodes"),
        metavar="N",
        default="",
        help="use only the first N hosts; with --listen: number of nodes, this "
        "one included",
    )
    add(
        "--standalone",
        action="store_true",
        help="use only this machine",
    )


def find_run_hosts(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Host, ...]:
    """Return what ``find_hosts`` does, without those that an option leaves out."""
    hosts = find_hosts(options, {} if options.standalone else environ)
    if options.standalone:
        _require_here(hosts)
    # With --listen it counts those that join.
    if not options.nodes or options.listen:
        return hosts
    num_nodes = options.nodes
    if not num_nodes.isdecimal() or not num_nodes.isascii() or int(num_nodes) < 1:
        raise UsageError(
            f"--nodes must be a whole number of at least 1, got {num_nodes!r}. Type: "
            "ronde run -H a,b --nodes 2 ..."
        )
    usable = [host for host in hosts if host.slots]
    if len(usable) < int(num_nodes):
        raise UsageError(
            f"--nodes must be at most {len(usable)}, the hosts that are known, got "
            f"{num_nodes}. Name all with -H, or have nodes join: --listen and --agent."
        )
    return tuple(usable[: int(num_nodes)])


def _require_here(hosts: Sequence[Host]) -> None:
    from ronde.launch.hosts.host import is_here

    for host in hosts:
        if not is_here(host):
            raise UsageError(
                "hosts must be this machine alone with --standalone, and so in "
                f"horovod.run(), got {host.name}. Start the program on several hosts "
                "with: ronde run -H a:4,b:4 python SCRIPT"
            )


def find_hosts(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Host, ...]:
    """Return the hosts that ranks may run on, at least one.

    They are those that an option names, else those of Slurm's allocation, else this
    machine. Reads the host file, and runs the discovery script, once.
    """
    given = {name: getattr(options, _attribute(name)) for name in _SOURCES}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(
            f"--{named[0]} must stand alone, got --{named[1]} too. Drop one."
        )
    slots = read_slots(options)
    if not named:
        return _unnamed(slots, environ)
    hosts = _read(named[0], given[named[0]])
    if slots == SLOTS_OPEN:
        return hosts
    is_useless = all(host.slots != SLOTS_OPEN for host in hosts)
    if is_useless and named[0] != "host-discovery-script":
        raise UsageError(
            f"--slots must be for hosts that say no slots themselves, got {slots}, but "
            f"all do, as {hosts[0].name} with {hosts[0].slots}. Drop one of the two."
        )
    return tuple(
        replace(host, slots=slots) if host.slots == SLOTS_OPEN else host
        for host in hosts
    )


def read_slots(options: argparse.Namespace) -> int:
    """Return the slots of a host that says none itself, as ``--slots`` has them."""
    if options.slots is None:
        return SLOTS_OPEN
    from ronde.launch.hosts.hostfile import MAX_SLOTS, parse_number

    return parse_number(options.slots, "slots", "--slots", lowest=1, highest=MAX_SLOTS)


def _attribute(name: str) -> str:
    return name.replace("-", "_")


def _unnamed(slots: int, environ: Mapping[str, str]) -> tuple[Host, ...]:
    hosts: Sequence[Host] | None = None
    if "SLURM_JOB_ID" in environ:
        from ronde.launch.hosts.sources import read_allocation

        hosts = read_allocation(environ)
    hosts = hosts or (Host(os.uname().nodename, said_at="this machine"),)
    if slots == SLOTS_OPEN:
        return tuple(hosts)
    return tuple(replace(host, slots=slots) for host in hosts)


def _read(source: str, text: str) -> tuple[Host, ...]:
    # Imported where they are needed: most jobs start without.
    match source:
        case "hosts":
            from ronde.launch.hosts.hostfile import parse_hosts

            return parse_hosts(text)
        case "hostfile":
            from ronde.launch.hosts.hostfile import parse_hostfile

            return parse_hostfile(read_text(text, "--hostfile"), text)
        case _:
            from ronde.launch.hosts.sources import discover

            return discover(text, f"--{source}")


def read_text(path: str, said_by: str) -> str:
    """Read a file."""
    try:
        return Path(path).read_bytes().decode()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{said_by} must be a file that can be read, got {path!r} ({error}). "
            "Check the path."
        ) from None
