"""The client of Ray of ``ronde run --launcher ray``, a program of its own.

This keeps Ray's threads and signal handlers out of the controller; and if this process
is killed, Ray ends its tasks and frees its placement group. It exchanges lines of JSON
with the controller and ends at the end of its standard input.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

_END_S = 10.0  # for the nodes to end by themselves
_BUSY_S = 2
_WEEK_S = 604_800
# If Ray kills a task, the kernel kills its agent: the node is lost at once.
_NODE = (
    "import signal, sys; from ronde.__main__ import main; "
    "from ronde.processes import die_with_parent; "
    "is_watched = die_with_parent(int(sys.argv.pop(1)), signal.SIGKILL); "
    "sys.exit(main() if is_watched else 1)"
)
_START = "Start one with ray start --head, or set RAY_ADDRESS to its address."


def run_node(words: list[str], token: str, version: str) -> list[str]:
    """Run ``ronde run --agent`` on a Ray node; return its host and its last error.

    Ray gets this function by value, so that a node without ronde can report that.
    """
    host = os.uname().nodename
    try:
        import ronde
    except ImportError as error:
        return [host, f"{error} (for {sys.executable})"]
    if ronde.__version__ != version:
        return [host, f"its ronde is {ronde.__version__}, here it is {version}"]
    done = subprocess.run(
        [sys.executable, "-c", _NODE, str(os.getpid()), "run", *words],
        input=token,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,
    )
    errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return [host, errors[-1].removeprefix("ronde: ")]


class _Client:
    def __init__(self) -> None:
        self._inputs: SimpleQueue[str] = SimpleQueue()
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._group: Any = None
        self._tasks: list[Any] = []
        Thread(target=self._follow_input, daemon=True).start()

    def run(self) -> None:
        try:
            self._place_nodes()
        except ConnectionError as error:
            reason = str(error).partition(". ")[0]
            self._send(failed=f"no Ray cluster can be reached: {reason}. {_START}")
        except Exception as error:  # noqa: BLE001 - the process's outermost line
            self._send(failed=f"Ray: {_in_one_line(error)}.")
        Event().wait()  # the other thread ends this process

    def _send(self, **message: object) -> None:
        with suppress(OSError):
            print(json.dumps(message), file=self._replies)

    def _follow_input(self) -> None:
        for line in sys.stdin:
            self._inputs.put(line)
        with suppress(Exception):
            if self._tasks:
                ray = import_module("ray")
                ray.wait(self._tasks, num_returns=len(self._tasks), timeout=_END_S)
                ray.util.remove_placement_group(self._group)
                ray.shutdown()
        os._exit(0)

    def _place_nodes(self) -> None:
        ray: Any = import_module("ray")
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        found = [
            (node["NodeManagerAddress"], node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        ]
        self._send(nodes=[(a, r.get("CPU", 0), r.get("GPU", 0)) for a, r in found])
        request = json.loads(self._inputs.get())
        bundles = request["bundles"]
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        self._group = group
        if not group.wait(_BUSY_S):
            self._send(notice=f"waiting for free resources on {len(bundles)} Ray nodes")
            group.wait(_WEEK_S)
        scheduling = import_module("ray.util.scheduling_strategies")
        task = ray.remote(max_retries=0, max_calls=1)(run_node)
        for index, bundle in enumerate(bundles):
            options = task.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            )
            own = [*request["words"], "--slots", str(bundle.get("GPU", bundle["CPU"]))]
            ref = options.remote(own, request["token"], request["version"])
            self._tasks.append(ref)
        left = self._tasks
        while left:
            (ended,), left = ray.wait(left, num_returns=1)
            try:
                host, reason = ray.get(ended)
            except Exception as error:  # noqa: BLE001 - Ray has many kinds
                host, reason = "a node", _in_one_line(error)
            self._send(failed=f"Ray: {host}: {reason.rstrip('.')}.")


def _in_one_line(error: Exception) -> str:
    words = str(error).partition("\n\n")[0].split()
    return " ".join(words)[:400].rstrip(".") or type(error).__name__


if __name__ == "__main__":
    _Client().run()
