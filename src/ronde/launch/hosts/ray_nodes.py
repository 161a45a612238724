"""Nodes of a Ray cluster that join a job: one agent on each, placed by Ray.

Ray's client is a program of its own, below, so that Ray's threads and signal handlers
stay out of the controller. It gets and sends lines of JSON, and ends at the end of its
input. If it is killed, Ray ends its tasks and frees its placement group.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Event, Thread
from typing import IO, Any, cast

import ronde
from ronde.addresses import source_towards
from ronde.errors import HostError, UsageError
from ronde.launch.host import SLOTS_CORES, SLOTS_GPUS
from ronde.launch.hosts.join_server import JoinConfig, JoinServer, wait_for_nodes
from ronde.launch.signals import raise_if_stopped, serve_ready
from ronde.store.authentication import SharedKey
from ronde.units import counted

_CONNECT_S, _END_S, _BUSY_S = 60, 10, 2
# If Ray kills a task, the kernel kills its agent: the node is lost at once.
_AGENT = """
import sys; from ronde.__main__ import main; from ronde.processes import die_with_parent
sys.exit(main() if die_with_parent(int(sys.argv.pop(1)), 9) else 1)
"""
_CURES = {
    ModuleNotFoundError: "Type: pip install 'ronde[ray]'",
    ConnectionError: "Start a cluster with ray start --head, or set RAY_ADDRESS.",
    TimeoutError: "Wait longer: --join-timeout. See: ray status",
}


def plan_bundles(
    nodes: Sequence[Mapping[str, float]],  # their resources
    num_ranks: int | None = None,
    each: int | None = None,  # ranks of a node, SLOTS_GPUS or SLOTS_CORES
    num_nodes: tuple[int, int] | None = None,  # at least and at most
) -> list[dict[str, int]]:
    """Return the resources that a job asks of each node.

    A slot is a GPU if the cluster has any; one node is filled after another. Else it is
    a CPU; ranks are spread, one per node if their number is open.
    """
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    is_gpu = each == SLOTS_GPUS or (has_gpus and each != SLOTS_CORES)
    kind, wanted = "GPU" if is_gpu else "CPU", num_ranks or 0
    counts = (int(node.get(kind, 0)) for node in nodes)
    found = sorted(filter(None, counts), reverse=True)
    least, most = num_nodes or (1, len(nodes))
    if each is None and found and not is_gpu:
        each = max(1, -(-wanted // min(most, len(found))))
    own = max(each or 0, 0)  # 0 for all of a node
    slots = [own or n for n in found if n >= own][:most]
    if len(slots) < least or sum(slots) < wanted:
        total, own = max(wanted, least * (own or 1)), own or 1
        raise UsageError(
            f"Ray must have {counted(total, kind)}, {own} or more on each of at least "
            f"{counted(least, 'node')}, got nodes with: "
            f"{', '.join(map(str, found)) or 'none'}. See: ray status"
        )
    if wanted:
        slots = [n for i, n in enumerate(slots) if sum(slots[:i]) < wanted]
    return [{"CPU": 1, "GPU": n} if is_gpu else {"CPU": n} for n in slots]


@contextmanager
def joined_ray_nodes(
    plan: Callable[[Sequence[Mapping[str, float]]], list[dict[str, int]]],
    timeout_s: float,
    signal_fd: int,
    notice: Callable[[str], None],
) -> Generator[JoinServer]:
    """Start an agent on nodes of a Ray cluster; yield them once all have joined.

    At the end of the block Ray's resources are freed.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # Ctrl-C must reach the controller only
    ) as client:
        pipes = cast("tuple[IO[bytes], IO[bytes]]", (client.stdin, client.stdout))
        nodes: list[tuple[str, dict[str, float]]] = []  # addresses and resources

        def on_readable() -> None:
            kind, value = json.loads(pipes[1].readline() or '["", "its client ended."]')
            if kind not in ("nodes", "notice"):
                raise HostError(f"Ray: {value}")
            nodes.extend(value) if kind == "nodes" else notice(value)

        def start(head: str) -> None:
            # The others, who know the reason, give up before the head.
            limit_s = timeout_s * 0.9
            words = ["--token-file", "-", "--join-timeout", f"{limit_s:g}s"]
            request = bundles, ["--agent", head, *words], token, ronde.__version__
            pipes[0].write(json.dumps([limit_s, *request]).encode() + b"\n")

        stop = signal_fd, select.POLLIN, partial(raise_if_stopped, signal_fd)
        watched = pipes[1].fileno(), select.POLLIN, on_readable
        ends_at = time.monotonic() + _CONNECT_S
        while not nodes:
            serve_ready([stop, watched], ends_at - time.monotonic())
            if time.monotonic() > ends_at:
                raise HostError(f"Ray: no answer. {_CURES[ConnectionError]}")
        bundles = plan([resources for _, resources in nodes])
        token, (address, _) = os.urandom(32).hex(), nodes[-1]
        listening, key = source_towards(address) or address, SharedKey(token.encode())
        # The head has no name here, as it runs no ranks.
        config = JoinConfig(listening, 0, key, "", len(bundles), timeout_s)
        config = config._replace(on_listening=start, watched=(watched,))
        yield wait_for_nodes(config, signal_fd, notice)


def run_agent(words: list[str], token: str, version: str) -> list[str]:
    """Run ``ronde run --agent`` on a Ray node; return its host and its last error."""
    # Ray gets this function by value: a node without ronde can report that.
    host = os.uname().nodename
    try:
        import ronde
    except ImportError as error:
        return [host, f"{error} (for {sys.executable})"]
    if ronde.__version__ != version:
        return [host, f"its ronde is {ronde.__version__}, here it is {version}"]
    agent = [sys.executable, "-c", _AGENT, str(os.getpid()), "run", *words]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run(agent, input=token, start_new_session=True)  # no signals of Ray's
    errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return [host, errors[-1].removeprefix("ronde: ")]


def _reply(kind: str, value: object) -> None:
    with suppress(OSError):
        os.write(_replies_fd, json.dumps((kind, value)).encode() + b"\n")


def _start_agents(inputs: "SimpleQueue[str]", tasks: list[Any]) -> None:
    ray: Any = import_module("ray")
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    alive = [node for node in ray.nodes() if node["Alive"]]
    _reply("nodes", [(n["NodeManagerAddress"], n["Resources"]) for n in alive])
    limit_s, bundles, words, token, version = json.loads(inputs.get())
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(min(_BUSY_S, limit_s)):
        _reply("notice", f"waiting for {counted(len(bundles), 'free node')} of Ray")
        if not group.wait(max(limit_s - _BUSY_S, 0)):
            raise TimeoutError(f"its nodes must be free within {limit_s:g} s")
    scheduling = import_module("ray.util.scheduling_strategies")
    task = ray.remote(max_retries=0, max_calls=1)(run_agent)
    for index, bundle in enumerate(bundles):
        strategy = scheduling.PlacementGroupSchedulingStrategy(group, index)
        gpus, cpus = bundle.get("GPU", 0), bundle["CPU"]
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}
        own = [*words, "--slots", str(gpus or cpus)]
        tasks.append(task.options(**options).remote(own, token, version))
    left = list(tasks)
    while left:
        (ended,), left = ray.wait(left, num_returns=1)
        host, reason = ray.get(ended)
        _reply("failed", f"{host}: {reason.rstrip('.')}.")


def _follow_input(inputs: "SimpleQueue[str]", tasks: list[Any]) -> None:
    for line in sys.stdin:
        inputs.put(line)
    signal.alarm(2 * _END_S)
    with suppress(Exception):
        ray = import_module("ray")
        ray.wait(tasks, num_returns=len(tasks), timeout=_END_S)
        ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    _replies_fd = os.dup(1)
    os.dup2(2, 1)
    _shared = SimpleQueue[str](), list[Any]()
    Thread(target=_follow_input, args=_shared, daemon=True).start()
    try:
        _start_agents(*_shared)
    except Exception as _error:  # noqa: BLE001 - the process's outermost line
        _text = " ".join(str(_error).partition(". ")[0].split()).rstrip(".")
        _cures = [cure for kind, cure in _CURES.items() if isinstance(_error, kind)]
        _reply("failed", " ".join([f"{_text:.400}.", *_cures]))
    Event().wait()  # the other thread ends this process
