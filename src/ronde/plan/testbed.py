"""Ranks that measure: on this machine, on hosts, or on emulated hosts with slow lines.

Note [Slow lines]
    An emulated host is a network namespace with a host name and one line to a bridge,
    which ``tc`` limits in both directions. The kernel kills the process that keeps a
    namespace when this one ends, even by SIGKILL. So nothing is left behind, and as
    namespaces have no names here, two runs never collide.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from typing import Any

from ronde.errors import LaunchError, UsageError
from ronde.launch.environments import base_environment, own_environment
from ronde.processes import end_with

_POLL_S = 0.1
_LEAST_BURST_BYTES = 1 << 17  # for packets of 64 KiB, which smaller bursts cut up
_BURST_S = 1e-3  # longer than a timer is late, shorter than a bucket takes
_PORT = "29500"  # all are free in a new namespace

Commands = list[tuple[Sequence[str], Mapping[str, str]]]  # with their environments
Starter = Callable[[int, Sequence[str]], Commands]
"""Returns commands that run ``python -m ronde WORDS`` on a number of ranks."""


def launched(
    options: Sequence[str], env: Mapping[str, str], num_ranks: int, words: Sequence[str]
) -> Commands:
    """Return the command of ``ronde run`` with some options."""
    python, own = (sys.executable, "-m", "ronde"), own_environment()
    run = (*python, "run", "-n", str(num_ranks), *options)
    return [((*run, "-m", "ronde", *words), own | dict(env))]


def run_ranks(commands: Commands) -> dict[str, Any]:
    """Run commands to their ends; return the JSON object that the first printed.

    Raises:
        LaunchError: A command failed.
    """
    with ExitStack() as exits:
        output = exits.enter_context(tempfile.TemporaryFile("w+"))
        errors = exits.enter_context(tempfile.TemporaryFile("w+"))
        processes: list[subprocess.Popen[bytes]] = []
        for command, env in commands:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=errors if processes else output,
                stderr=errors,
                process_group=0,  # Ctrl-C must reach this process only
                preexec_fn=end_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509
            )
            processes.append(exits.enter_context(process))  # waits for its end
            exits.callback(process.terminate)
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            with suppress(subprocess.TimeoutExpired):
                processes[codes.index(None)].wait(_POLL_S)
            codes = [each.poll() for each in processes]
        if any(codes):
            errors.seek(0)
            raise LaunchError(
                f"every rank must exit with 0, got {codes}:\n{errors.read()[-2000:]}"
            )
        output.seek(0)
        text = output.read()
    return json.loads(text[text.index("{") :])


@contextmanager
def emulated_hosts(
    num: int, ranks_per_node: int, rate_bit: float, env: Mapping[str, str]
) -> Generator[Starter]:
    """Make hosts with lines of a rate, which may be infinite; yield their starter.

    Raises:
        UsageError: The user is not root, or cannot make namespaces.
    """
    if os.geteuid() != 0:
        raise UsageError(
            "--rate needs root, as only root can limit a line. Leave it out to use "
            "this machine's own."
        )
    limit = ""
    if rate_bit < inf:
        burst = max(_LEAST_BURST_BYTES, rate_bit / 8 * _BURST_S)
        limit = f"tbf rate {rate_bit:.0f}bit burst {burst:.0f} latency 50ms"
        limit = f"; tc qdisc add dev $device root {limit}"
    with ExitStack() as exits:
        bridge = "ip link add switch type bridge; ip link set switch up"
        switch = exits.enter_context(_namespace(bridge))
        enter, hosts = shlex.join(_enter(switch)), list[str]()
        for index in range(num):
            end = f"host{index}"
            pair = f"ip link add eth0 type veth peer name {end} netns {switch}"
            join = f"device={end}; ip link set {end} master switch up{limit}"
            address = f"ip address add {_address(index)}/16 dev eth0"
            up = f"ip link set lo up; device=eth0; ip link set eth0 up{limit}"
            join = f"{enter} sh -ec {shlex.quote(join)}"
            script = f"hostname ronde-{end}; {pair}; {join}; {address}; {up}"
            hosts.append(exits.enter_context(_namespace(script)))

        def start(num_ranks: int, words: Sequence[str]) -> Commands:
            of_all = base_environment(own_environment()) | {
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(min(ranks_per_node, num_ranks)),
                "MASTER_ADDR": _address(0),
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it remarks that addresses are unnamed
            }
            commands: Commands = []
            for rank in range(num_ranks):
                node, local_rank = divmod(rank, ranks_per_node)
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), **env}
                ronde = sys.executable, "-m", "ronde", *words
                commands.append(((*_enter(hosts[node]), *ronde), of_all | own))
            return commands

        yield start


@contextmanager
def _namespace(script: str) -> Generator[str]:
    """Run a script in new namespaces; yield the pid of a process that keeps them."""
    script += "; echo; exec sleep infinity"
    words = ("unshare", "--net", "--uts", "sh", "-ec", script)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=end_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509
    ) as keeper:
        try:
            line = keeper.stdout.readline() if keeper.stdout else ""
            if line != "\n":
                raise UsageError(
                    f"--rate needs network namespaces, but got: {line.strip()}. Leave "
                    "it out to use this machine's own line."
                )
            yield str(keeper.pid)
        finally:
            keeper.kill()


def _enter(pid: str) -> tuple[str, ...]:
    return ("nsenter", "--target", pid, "--net", "--uts", "--")


def _address(index: int) -> str:
    return f"10.213.{index // 250}.{index % 250 + 1}"
