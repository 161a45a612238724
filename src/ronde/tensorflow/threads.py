"""TensorFlow's threads: a collective in a graph holds one while it waits."""

import os
from contextlib import suppress
from typing import Any

from ronde.session.frameworks import import_framework
from ronde.world.environment import own_or

tf: Any = import_framework("tensorflow")

_LEAST = 8
_SETTING = "TF_NUM_INTEROP_THREADS"  # TensorFlow's own


def request_threads() -> None:
    """Ask for enough inter-op threads, unless the user or a running context has."""
    threading = tf.config.threading
    is_chosen = (
        own_or(None).get(_SETTING) or threading.get_inter_op_parallelism_threads()
    )
    if is_chosen or (os.cpu_count() or 1) >= _LEAST:  # as many as cores by default
        return
    with suppress(RuntimeError):  # the context is made, and has its threads
        threading.set_inter_op_parallelism_threads(_LEAST)
