"""A rank that meets the others and then stays until a file is there.

``python -m tests.cluster.waiting_rank FOLDER``, in some launcher's environment.
"""

import sys
import time
from pathlib import Path

import torch

import ronde.torch as rd


def main():
    """Reduce, say so by a file, wait, reduce once more."""
    folder = Path(sys.argv[1])
    rd.init()
    for word in ("ready", "done"):
        total = rd.allreduce(torch.ones(1), op=rd.Sum).item()
        (folder / f"{word}.{rd.rank()}").write_text(str(total))
        while not (folder / "end").exists():
            time.sleep(0.02)
    rd.shutdown()


if __name__ == "__main__":
    main()
