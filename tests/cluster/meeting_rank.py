"""A rank that meets the others, reduces, and says by which addresses.

``python -m tests.cluster.meeting_rank``, in some launcher's environment.
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


def main():
    """Tell in a line of JSON the sum over the ranks, or what was wrong."""
    try:
        rd.init()
    except RondeError as error:
        tell(error=str(error))
        return
    total = rd.allreduce(torch.tensor([rd.rank() + 1.0]), op=rd.Sum).item()
    own = {
        found.address for found in sockets_of(os.getpid()) if found.pid == os.getpid()
    }
    tell(rank=rd.rank(), total=total, listens=sorted(own))
    # Nobody leaves while another still looks.
    rd.barrier()
    rd.shutdown()


if __name__ == "__main__":
    main()
