"""A rank that meets the others, reduces, and says by which addresses.

``python -m tests.cluster.meeting_rank [JSON...]``, in some launcher's environment; with
arguments it meets once for each, which is its environment then.
"""

import json
import os
import sys

import torch
from tests.cluster.observation import sockets_of

import ronde.torch as rd
from ronde.errors import RondeError


def tell(**said):
    """Write a line at once, so that those of several ranks do not mix."""
    os.write(sys.stdout.fileno(), f"{json.dumps(said)}\n".encode())


def listening():
    """Return the sockets of this process that listen."""
    return {found for found in sockets_of(os.getpid()) if found.pid == os.getpid()}


def meet():
    """Tell in a line of JSON the sum over the ranks, or what was wrong."""
    earlier = listening()
    try:
        rd.init()
    except RondeError as error:
        tell(error=str(error))
        return
    total = rd.allreduce(torch.tensor([rd.rank() + 1.0]), op=rd.Sum).item()
    own = {found.address for found in listening() - earlier}
    tell(rank=rd.rank(), total=total, listens=sorted(own))
    # Nobody leaves while another still looks.
    rd.barrier()
    rd.shutdown()


def main():
    """Meet as often as there are environments."""
    before = dict(os.environ)  # noqa: TID251  as a launcher sets it
    for further in map(json.loads, sys.argv[1:] or ["{}"]):
        os.environ.clear()  # noqa: TID251
        os.environ.update(before | further)  # noqa: TID251
        meet()


if __name__ == "__main__":
    main()
