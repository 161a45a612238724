"""Nodes of a Ray cluster that join a job: one agent on each, placed by Ray."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import IO, NamedTuple, cast

import ronde
from ronde.addresses import source_towards
from ronde.errors import HostError, UsageError
from ronde.launch.host import SLOTS_CORES, SLOTS_GPUS, Host
from ronde.launch.hosts.join_server import JoinConfig, wait_for_nodes
from ronde.launch.signals import raise_if_stopped, serve_ready
from ronde.launch.wire.tls import TlsChannel
from ronde.store.authentication import SharedKey
from ronde.units import counted

_END_S = 15.0  # for the driver, which waits for the nodes
_READ_BYTES = 1 << 16


class RayNode(NamedTuple):
    """A node of a Ray cluster, and its resources as Ray counts them."""

    address: str
    cpus: float
    gpus: float


class RayRequest(NamedTuple):
    """The nodes and slots that a job needs of a Ray cluster."""

    num_ranks: int | None = None
    num_each: int | None = None  # ranks per node, SLOTS_GPUS or SLOTS_CORES
    num_nodes: tuple[int, int] | None = None  # at least and at most; None for all
    timeout_s: float = 300.0


def plan_bundles(
    nodes: Sequence[RayNode], request: RayRequest
) -> list[dict[str, float]]:
    """Return the resources that the job asks of each node; a slot is a GPU or a CPU.

    With GPUs in the cluster a slot is a GPU, and one node is filled after another.
    Without GPUs ranks are spread, one per node if their number is open.
    """
    each = request.num_each
    is_gpu = each == SLOTS_GPUS or any(node.gpus >= 1 for node in nodes)
    is_gpu = is_gpu and each != SLOTS_CORES
    least_each = max(each or 1, 1)
    slots = sorted(int(n.gpus if is_gpu else n.cpus) for n in nodes)[::-1]
    slots = [each if each == least_each else n for n in slots if n >= least_each]
    least, most = request.num_nodes or (1, len(slots))
    kind, see = "GPU" if is_gpu else "CPU", "See: ray status"
    if len(slots) < least:
        raise UsageError(
            f"Ray must have {counted(least, 'node')} with {counted(least_each, kind)} "
            f"or more, got {len(slots)} of {len(nodes)}. {see}"
        )
    slots, num_ranks = slots[:most], request.num_ranks or 0
    if sum(slots) < num_ranks:
        raise UsageError(
            f"-n must be at most {sum(slots)}, the slots of "
            f"{counted(len(slots), 'Ray node')}, got {num_ranks}. {see}"
        )
    if each is None and not is_gpu:
        share = 1
        while sum(min(n, share) for n in slots) < num_ranks:
            share += 1
        slots = [min(n, share) for n in slots]
    if num_ranks:
        before = accumulate(slots, initial=0)
        slots = [
            n for n, taken in zip(slots, before, strict=False) if taken < num_ranks
        ]
    if not is_gpu:
        return [{"CPU": n} for n in slots]
    cpus = min(node.cpus for node in nodes if node.gpus >= 1)
    return [{"CPU": min(cpus, n), "GPU": n} for n in slots]


@contextmanager
def joined_ray_nodes(
    request: RayRequest, signal_fd: int, notice: Callable[[str], None]
) -> Generator[list[tuple[Host, TlsChannel]]]:
    """Start an agent on nodes of a Ray cluster; yield them once all have joined.

    At the end of the block, Ray's resources are freed.
    """
    if find_spec("ray") is None:
        raise UsageError(
            "--launcher ray needs Ray, which is not installed. "
            "Type: pip install 'ronde[ray]'"
        )
    driver = _Driver(notice)
    stop = signal_fd, select.POLLIN, partial(raise_if_stopped, signal_fd)
    watched = driver.fd, select.POLLIN, driver.on_readable
    ends_at = time.monotonic() + request.timeout_s
    try:
        while not driver.nodes:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise HostError(
                    f"Ray did not answer within {request.timeout_s:g} s. Check "
                    "RAY_ADDRESS, or wait longer: --join-timeout"
                )
            serve_ready([stop, watched], left_s)
        bundles = plan_bundles(driver.nodes, request)
        token = os.urandom(32).hex()
        config = JoinConfig(
            # Towards another node; with one node it may be this machine.
            address=source_towards(driver.nodes[-1].address) or "127.0.0.1",
            port=0,
            token=SharedKey(token.encode()),
            head="",  # runs no ranks
            num_nodes=len(bundles),
            timeout_s=request.timeout_s,
            on_listening=partial(driver.start, bundles, token, request.timeout_s),
        )
        yield wait_for_nodes(config, signal_fd, notice, [watched])
    finally:
        driver.close()


class _Driver:
    """The process that is Ray's client."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.nodes: list[RayNode] = []
        self._notice = notice
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("ray_driver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C must reach the controller only
        )
        pipes = self._process.stdin, self._process.stdout
        self._stdin, self._stdout = cast("tuple[IO[bytes], IO[bytes]]", pipes)
        self.fd = self._stdout.fileno()
        self._unread = b""

    def start(
        self,
        bundles: Sequence[dict[str, float]],
        token: str,
        timeout_s: float,
        head: str,
    ) -> None:
        # The node, which knows the reason, gives up before the head.
        timeout = f"{timeout_s * 0.9:g}s"
        request = {
            "bundles": bundles,
            "words": ["--agent", head, "--token-file", "-", "--join-timeout", timeout],
            "token": token,
            "version": ronde.__version__,
        }
        self._stdin.write(json.dumps(request).encode() + b"\n")

    def on_readable(self) -> None:
        data = os.read(self.fd, _READ_BYTES)
        if not data:
            code = self._process.wait()
            raise HostError(f"Ray's client exited with code {code}. Try: ray status")
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            for kind, value in json.loads(line).items():
                if kind == "notice":
                    self._notice(value)
                elif kind == "nodes":
                    self.nodes = [RayNode(*each) for each in value]
                else:
                    raise HostError(value)

    def close(self) -> None:
        self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
