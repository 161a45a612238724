"""Programs choose the backend by its own name or by Gloo's."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.limits import HANG_S

PROGRAM = r"""
import os
import sys
import torch
import torch.distributed as dist

for backend in sys.argv[1:]:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    half = dist.new_group([0])
    if rank == 0:
        assert dist.get_backend(half) == backend
    group = dist.group.WORLD
    words = [dist.get_backend(), type(group).__name__, getattr(group, "engine", "")]
    sys.stdout.write(" ".join(words) + "\n")  # at once, unlike print
    sys.stdout.flush()
    dist.destroy_process_group()
os._exit(0)
"""
"""Skips exit handlers: with torch's own Gloo a process may abort at exit."""
RUN = (sys.executable, "-m", "ronde", "run", "--no-prefix", "-n")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def lines_of(
    tmp_path: Path, launcher: Sequence[str], *backends: str, **more: str
) -> list[str]:
    """Return the lines of all ranks, sorted."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [*launcher, str(path), *backends],
        env={**os.environ, **more},  # noqa: TID251
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_backend_is_chosen_by_name(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, (*RUN, "2"), "ronde", "gloo")
    assert [line.split()[:2] for line in lines] == [
        *[["gloo", "ProcessGroup"]] * 2,
        *[["ronde", "RondeProcessGroup"]] * 2,
    ]


def test_replace_gloo(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, (*RUN, "1", "--replace-gloo"), "gloo")
    assert [line.split()[:2] for line in lines] == [["gloo", "RondeProcessGroup"]]


def test_environment_chooses_under_torchrun(tmp_path: Path) -> None:
    chosen = {"RONDE_REPLACE_GLOO": "1", "RONDE_ENGINE": "gloo"}
    lines = lines_of(tmp_path, TORCHRUN, "ronde", "gloo", **chosen)
    assert lines == [
        *["gloo RondeProcessGroup gloo"] * 2,
        *["ronde RondeProcessGroup gloo"] * 2,
    ]
