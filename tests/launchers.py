"""Commands by which other launchers start Python ranks on this machine."""

import os
import sys
from pathlib import Path

from ronde.launch import base_environment, own_environment


def launcher_words(name: str, size: int, python: str = sys.executable) -> list[str]:
    """Return the words before a script's path that start it.

    Args:
        name: ``python`` for one rank alone, ``torchrun``, ``mpirun`` or ``ronde``.
        size: Number of ranks.
        python: Of the ranks; torchrun and ronde run in it, too.
    """
    if name == "python":
        return [python]
    if name == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone"]
        return [python, *words, "--nproc-per-node", str(size)]
    if name == "ronde":
        return [python, "-m", "ronde", "run", "--no-prefix", "-n", str(size)]
    options = ["--oversubscribe", "--timeout", "100"]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    program = str(Path(sys.executable).parent / "mpirun")
    return [program, "-n", str(size), *options, python]


def launcher_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment outside of any launcher, with one thread a rank.

    Args:
        folder: For temporary files, also Open MPI's.
        more: Further variables.
    """
    own = base_environment(own_environment())
    files = ("TMPDIR", "OMPI_MCA_btl_sm_backing_directory")
    return own | {"OMP_NUM_THREADS": "1"} | dict.fromkeys(files, str(folder)) | more
