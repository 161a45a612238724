"""The program of ``horovod.run``'s ranks: ``python -m ronde.horovod DIRECTORY``."""

import sys
from pathlib import Path

from ronde.horovod.launcher import run_rank

if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
