"""Ranks that measure: on this machine, on hosts, or on emulated hosts with slow lines.

Note [Slow lines]
    An emulated host is a network namespace with a host name and one line to a bridge,
    which ``tc`` limits in both directions. Each namespace lives as long as a process
    that the kernel kills when this one ends, in whatever way. So nothing is left
    behind, and as namespaces have no names here, two runs never collide.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from typing import Any

from ronde.errors import LaunchError, UsageError
from ronde.launch.environments import base_environment, own_environment
from ronde.processes import end_with

_POLL_S = 0.1
_LEAST_BURST_BYTES = 16384
_BURST_S = 1e-3  # longer than a timer is late, shorter than a bucket takes
_PORT = "29500"  # all are free in a new namespace

Commands = list[tuple[Sequence[str], Mapping[str, str]]]  # with their environments
Starter = Callable[[int, Sequence[str], Mapping[str, str]], Commands]
"""Returns commands that run ``python -m ronde WORDS`` on a number of ranks."""


def launched(
    options: Sequence[str],
    num_ranks: int,
    words: Sequence[str],
    env: Mapping[str, str],
) -> Commands:
    """Return the command of ``ronde run`` with some options."""
    own = (sys.executable, "-m", "ronde", "run", "-n", str(num_ranks), *options)
    return [((*own, "-m", "ronde", *words), own_environment() | dict(env))]


def run_ranks(commands: Commands) -> dict[str, Any]:
    """Run commands to their ends; return the JSON object that the first printed.

    Raises:
        LaunchError: A command failed.
    """
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            for command, env in commands:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=errors if processes else subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        process_group=0,  # Ctrl-C must reach this process only
                        preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
                    )
                )
            while not any(process.poll() for process in processes):
                running = [each for each in processes if each.returncode is None]
                if not running:
                    break
                with suppress(subprocess.TimeoutExpired):
                    running[0].wait(_POLL_S)
        finally:
            for process in processes:
                process.terminate()
            output, _ = processes[0].communicate() if processes else ("", "")
            codes = [process.wait() for process in processes]
        errors.seek(0)
        if any(codes) or "{" not in output:
            raise LaunchError(
                f"every rank must exit with 0, got {codes}:\n{errors.read()[-2000:]}"
            )
    return json.loads(output[output.index("{") :])


@contextmanager
def emulated_hosts(
    num: int, ranks_per_node: int, rate_bit: float
) -> Generator[Starter]:
    """Make hosts with lines of a rate, which may be infinite; yield their starter.

    Raises:
        UsageError: The user is not root, or has no right to make namespaces.
    """
    if os.geteuid() != 0:
        raise UsageError(
            "--rate needs root, as only root can limit a line. Leave it out to use the "
            "machine's own."
        )
    with ExitStack() as exits:
        switch = exits.enter_context(_namespace("--net"))
        _run_in(switch, "ip link add switch type bridge; ip link set switch up")
        hosts = [exits.enter_context(_namespace("--net", "--uts")) for _ in range(num)]
        for index, host in enumerate(hosts):
            _connect(switch, host, index, rate_bit)
        yield partial(_on_hosts, hosts, ranks_per_node)


def _on_hosts(
    hosts: Sequence[int],
    ranks_per_node: int,
    num_ranks: int,
    words: Sequence[str],
    env: Mapping[str, str],
) -> Commands:
    shared = base_environment(own_environment()) | {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(min(ranks_per_node, num_ranks)),
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it would remark that addresses have no names
    }
    commands: Commands = []
    for rank in range(num_ranks):
        node, local_rank = divmod(rank, ranks_per_node)
        enter = ("nsenter", "-t", str(hosts[node]), "--net", "--uts", "--")
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        command = (*enter, sys.executable, "-m", "ronde", *words)
        commands.append((command, shared | own | dict(env)))
    return commands


@contextmanager
def _namespace(*kinds: str) -> Generator[int]:
    """Yield the pid of a process that keeps new namespaces."""
    with subprocess.Popen(
        ("unshare", *kinds, "sh", "-c", "echo up; exec sleep infinity"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
    ) as keeper:
        try:
            output, errors = keeper.stdout, keeper.stderr
            if output is None or errors is None or not output.readline():
                raise _refusal(errors.read() if errors else "")
            yield keeper.pid
        finally:
            keeper.kill()


def _connect(switch: int, host: int, index: int, rate_bit: float) -> None:
    end, limit = f"host{index}", "true"
    if rate_bit < inf:
        burst = max(_LEAST_BURST_BYTES, rate_bit / 8 * _BURST_S)
        limit = f"tbf rate {rate_bit:.0f}bit burst {burst:.0f} latency 50ms"
        limit = f'tc qdisc add dev "$0" root {limit}'
    pair = f"ip link add {end} type veth peer name eth0 netns {host}"
    _run_in(switch, f"{pair}; ip link set {end} master switch up; {limit}", end)
    address = f"ip address add {_address(index)}/16 dev eth0"
    links = "ip link set lo up; ip link set eth0 up"
    _run_in(host, f"hostname ronde-{end}; {address}; {links}; {limit}", "eth0")


def _address(index: int) -> str:
    return f"10.213.{index // 250}.{index % 250 + 1}"


def _run_in(pid: int, script: str, device: str = "") -> None:
    words = ("nsenter", "-t", str(pid), "--net", "--uts", "sh", "-ec", script, device)
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise _refusal(done.stderr)


def _refusal(error: str) -> UsageError:
    return UsageError(
        f"--rate needs network namespaces, got: {error.strip()}. Leave it out to use "
        "the machine's own line."
    )
