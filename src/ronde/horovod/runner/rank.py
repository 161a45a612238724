"""One rank of ``horovod.run``: ``python -m ronde.horovod.runner.rank DIRECTORY``."""

import sys
from pathlib import Path

from ronde.horovod.runner.calls import make_call
from ronde.world import read_rank_info

if __name__ == "__main__":
    claim = read_rank_info()
    make_call(Path(sys.argv[1]), claim.rank, claim.size)
