"""Hosts from Slurm's allocation and from a discovery script."""

import os
import subprocess
import time
from collections.abc import Mapping
from typing import IO, cast

from ronde.errors import UsageError, WorldError
from ronde.launch.hosts.host import SLOTS_OPEN, Host
from ronde.launch.hosts.hostfile import (
    MAX_SLOTS,
    check_name,
    parse_hostfile,
    parse_number,
)
from ronde.launch.process_tree import adopting_orphans, children, sweep
from ronde.launch.signals import (
    InterruptedStartError,
    caught_signals,
    raise_if_stopped,
    wait_for,
)
from ronde.world.host_lists import expand_list
from ronde.world.launcher_env import parse_tasks_per_node

_CURE = "Name the hosts by -H or --hostfile."
_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_POLL_S = 0.02


def allocated_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the allocation's hosts, in Slurm's order; none outside."""
    name = _list_name(environ)
    if not name:
        return ()
    return tuple(check_name(one, name) for one in expand_list(environ[name], name))


def read_allocation(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the hosts of the allocation, in Slurm's order; None outside of one.

    A host has a slot for each of its tasks, where somewhere there is more than one; one
    task a host is what Slurm gives those who asked for none. Then it has one for each
    GPU that Slurm gives it, and where that is not known its slots are open.
    """
    # First of all: such a job lists its hosts under other names.
    num_groups = environ.get("SLURM_HET_SIZE", "1")
    if num_groups != "1" and "SLURM_JOB_ID" in environ:
        raise UsageError(
            "SLURM_HET_SIZE must be 1, since only the allocation of a plain job is "
            f"read, got {num_groups!r}. {_CURE}"
        )
    names = allocated_names(environ)
    if not names:
        return None
    name = _list_name(environ)
    slots = _slots(environ, len(names), f"{name}={environ[name]}")
    return tuple(
        Host(one, count, said_at=name) for one, count in zip(names, slots, strict=True)
    )


def _list_name(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that lists the hosts; empty outside."""
    names = _LISTS if "SLURM_JOB_ID" in environ else ()
    return next((name for name in names if environ.get(name)), "")


def _slots(environ: Mapping[str, str], num_hosts: int, hosts: str) -> list[int]:
    tasks = _tasks(environ, num_hosts, hosts)
    if max(tasks) > 1:
        return tasks
    # Slurm gives the GPUs of this host, where it started this process. Only a job that
    # asked for a total can have other counts elsewhere.
    name, num_gpus = "SLURM_GPUS_ON_NODE", 0
    if name in environ and not (num_hosts > 1 and "SLURM_GPUS" in environ):
        num_gpus = parse_number(environ[name], name, "Slurm", highest=MAX_SLOTS)
    return [num_gpus or SLOTS_OPEN] * num_hosts


def _tasks(environ: Mapping[str, str], num_hosts: int, hosts: str) -> list[int]:
    """Return the tasks that were asked for on each host; all 1 where none were."""
    each_name, name = "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"
    # Without a task that was asked for, the counts are those of CPUs.
    is_asked = "SLURM_NTASKS" in environ or each_name in environ
    if is_asked and name in environ:
        try:
            tasks = parse_tasks_per_node(environ[name], name)
        except WorldError as error:
            raise UsageError(f"{error} {_CURE}") from None
        if len(tasks) == num_hosts:
            return tasks
        # In a step on some of the hosts they are the step's.
        if "SLURM_STEP_ID" not in environ:
            raise UsageError(
                f"{name} must have a count for each of the {num_hosts} hosts in "
                f"{hosts}, got {environ[name]!r}, which has {len(tasks)}. {_CURE}"
            )
    each = environ.get(each_name, "1")
    return [parse_number(each, each_name, "Slurm", highest=MAX_SLOTS)] * num_hosts


def discover(script: str, said_by: str, timeout_s: float = 60.0) -> tuple[Host, ...]:
    """Run a discovery script once and return the hosts that it prints.

    It prints what a host file may hold; ``h1`` and ``h1:2`` are such lines. One that
    fails, takes too long or is interrupted is ended with all that it started. Only in
    the main thread.
    """
    others = children()
    try:
        # Signals that end a job do so here: the loop that waits for them comes later.
        with (
            adopting_orphans(),
            caught_signals() as signal_fd,
            subprocess.Popen(  # noqa: S602  horovodrun takes a command line, too
                script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            ) as process,
        ):
            try:
                printed = _read_printed(process, signal_fd, timeout_s)
            except (ValueError, InterruptedStartError):
                sweep(spared=others)
                raise
    except ValueError as error:
        raise UsageError(
            f"{said_by} must print hosts and end with 0, got {script!r} ({error}). Run "
            "it by hand."
        ) from None
    return parse_hostfile(printed, f"{said_by} {script}")


def _read_printed(
    process: "subprocess.Popen[bytes]", signal_fd: int, timeout_s: float
) -> str:
    output = cast("IO[bytes]", process.stdout)
    ends_at_s = time.monotonic() + timeout_s
    printed, is_open = b"", True
    while is_open or process.poll() is None:
        left_s = ends_at_s - time.monotonic()
        if left_s <= 0:
            raise ValueError(f"it takes longer than {timeout_s:g} s")
        readable = [signal_fd, *([output.fileno()] if is_open else [])]
        for fd in wait_for(readable, [], left_s if is_open else _POLL_S):
            if fd == signal_fd:
                raise_if_stopped(signal_fd)
                continue
            data = os.read(fd, 65536)
            printed += data
            is_open = bool(data)
    if process.returncode:
        raise ValueError(f"exit code {process.returncode}")
    return printed.decode("utf-8")
