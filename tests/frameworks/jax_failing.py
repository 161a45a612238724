"""A rank of which the last one fails, between two calls of a compiled function."""

import os
import signal
import sys

import jax
import jax.numpy as jnp

import ronde.jax as hvd

hvd.init()
reduce = jax.jit(lambda x: hvd.allreduce(x, name="lasting"))
reduce(jnp.ones(2)).block_until_ready()
if hvd.rank() == 1:
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # stalls, until rank 0 has failed
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to see the error
try:
    reduce(jnp.ones(2)).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    sys.exit(f"raised {error}")
