"""How other hosts are reached: the options for that, and what they stand for."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence

from ronde.errors import UsageError
from ronde.launch.spawners.base import Spawner

_LAUNCHERS = ("auto", "ssh", "slurm")


def add_ssh_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how other hosts are reached."""
    add = parser.add_argument_group("other hosts").add_argument
    add(
        "--launcher",
        default="auto",
        metavar="NAME",
        help="how to start programs on other hosts: ssh, slurm (srun) or auto: slurm "
        "for the hosts of its allocation, else ssh (default: auto)",
    )
    add(
        "--ssh-args",
        action="append",
        default=[],
        metavar="ARGS",
        help="arguments for ssh in one word, as '-F my_config -J gate'; they win "
        "over ronde's own",
    )
    add(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help=f"Python on the other hosts (default: the same as here, {sys.executable})",
    )


def make_spawner(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    more_ssh_args: Sequence[str] = (),
) -> Spawner:
    """Return what starts programs on other hosts."""
    ssh_args = (*_ssh_args(options.ssh_args), *more_ssh_args)
    match require_launcher(options.launcher):
        case "auto":
            is_slurm = "SLURM_JOB_ID" in environ and not _are_hosts_named(options)
            return _slurm(environ) if is_slurm else _ssh(ssh_args)
        case "ssh":
            return _ssh(ssh_args)
        case _:
            return _slurm(environ)


def require_launcher(name: str) -> str:
    """Return ``name``, which is what ``--launcher`` may be."""
    if name not in _LAUNCHERS:
        raise UsageError(
            f"--launcher must be one of {', '.join(_LAUNCHERS)}, got {name!r}. Choose "
            "one."
        )
    return name


def _are_hosts_named(options: argparse.Namespace) -> bool:
    sources = (options.hosts, options.hostfile, options.host_discovery_script)
    return any(source is not None for source in sources)


def _ssh_args(texts: Sequence[str]) -> list[str]:
    try:
        return [word for text in texts for word in shlex.split(text)]
    except ValueError as error:
        raise UsageError(
            f"--ssh-args must be words as a shell takes them, got {texts[-1]!r} "
            f"({error}). Close the quote."
        ) from None


# Each is imported where it is chosen: a job on one host needs none of them.
def _ssh(ssh_args: Sequence[str]) -> Spawner:
    from ronde.launch.spawners.ssh import SshSpawner

    return SshSpawner(ssh_args)


def _slurm(environ: Mapping[str, str]) -> Spawner:
    if "SLURM_JOB_ID" not in environ:
        raise UsageError(
            "--launcher slurm must be inside an allocation, got none. "
            "Type: salloc -N 2 ronde run ..."
        )
    from ronde.launch.spawners.slurm import SlurmSpawner

    return SlurmSpawner()
