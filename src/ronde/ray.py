"""A backend of Ray Train: ``hvd.init()`` works in its workers.

``TorchTrainer(train_loop, torch_config=RondeConfig(), scaling_config=...)``; other
trainers take it as ``backend_config``.
"""

import os
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from ronde.world import World

ray: Any = import_module("ray")
_train: Any = import_module("ray.train.backend")
_LEAVE_S = 5.0
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


class RondeConfig(_train.BackendConfig):
    """Makes each worker of Ray Train a rank."""

    backend = "ronde"  # TorchTrainer would set another one

    @property
    def backend_cls(self) -> type[Any]:
        return RondeBackend


class RondeBackend(_train.Backend):
    """Sets the variables that ``hvd.init()`` reads, and removes them at the end."""

    share_cuda_visible_devices = True  # a rank's GPU has the number LOCAL_RANK

    def on_start(self, workers: Any, _: RondeConfig) -> None:  # noqa: ANN401
        nodes, addresses, ports = zip(*workers.execute(_node_and_address), strict=True)
        for rank in range(len(nodes)):
            values = *World.from_hosts(rank, nodes), addresses[0], ports[0]
            workers.execute_single(rank, _set_variables, values)

    def on_shutdown(self, workers: Any, _: RondeConfig) -> None:  # noqa: ANN401
        # Ray ends a worker that waits for a lost one.
        with suppress(ray.exceptions.GetTimeoutError):
            ray.get(workers.execute_async(_leave), timeout=_LEAVE_S)


def _node_and_address() -> tuple[str, str, int]:
    """Return this worker's node, its address, and a free port there."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as free:
        node = ray.get_runtime_context().get_node_id()
        return node, address, free.getsockname()[1]


def _set_variables(values: tuple[int | str, ...]) -> None:
    os.environ.update(zip(_NAMES, map(str, values), strict=True))  # noqa: TID251


def _leave() -> None:
    if "ronde.session" in sys.modules:
        sys.modules["ronde.session"].shutdown()
    for name in _NAMES:
        os.environ.pop(name, None)  # noqa: TID251
