"""How programs come to the backend: by its name, or by Gloo's."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAM = r"""
import sys
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((3,), rank + 1.0)
dist.all_reduce(tensor)
assert tensor.tolist() == [size * (size + 1) / 2] * 3
half = dist.new_group([0])
if rank == 0:
    assert dist.get_backend(half) == sys.argv[1]
group = type(dist.group.WORLD).__name__
sys.stdout.write(f"{dist.get_backend()} {group}\n")  # at once, unlike print
sys.stdout.flush()
dist.destroy_process_group()
"""
RUN = (sys.executable, "-m", "ronde", "run", "-n", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


def lines_of(
    tmp_path: Path,
    launcher: Sequence[str],
    *words: str,
    program: str = PROGRAM,
    **more: str,
) -> list[str]:
    """Return what the ranks of the program say of their group."""
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [*launcher, str(path), *words]
    env = {**os.environ, **more}  # noqa: TID251
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.rpartition(":")[2].strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("launcher", [(*RUN, "--no-prefix"), TORCHRUN])
def test_a_name_is_enough(tmp_path: Path, launcher: Sequence[str]) -> None:
    assert lines_of(tmp_path, launcher, "ronde") == ["ronde RondeProcessGroup"] * 2


def test_in_the_place_of_gloo(tmp_path: Path) -> None:
    launcher = (*RUN, "--no-prefix", "--replace-gloo")
    assert lines_of(tmp_path, launcher, "gloo") == ["gloo RondeProcessGroup"] * 2


def test_in_the_place_of_gloo_under_torchrun(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, TORCHRUN, "gloo", RONDE_REPLACE_GLOO="1")
    assert lines == ["gloo RondeProcessGroup"] * 2


def test_gloo_is_gloo_otherwise(tmp_path: Path) -> None:
    launcher = (*RUN, "--no-prefix")
    assert lines_of(tmp_path, launcher, "gloo") == ["gloo ProcessGroup"] * 2


def test_the_engine_is_the_environments(tmp_path: Path) -> None:
    asked = "dist.group.WORLD._communicator.engine"
    program = PROGRAM.replace("type(dist.group.WORLD).__name__", asked)
    lines = lines_of(tmp_path, TORCHRUN, "ronde", program=program, RONDE_ENGINE="gloo")
    assert lines == ["ronde gloo"] * 2
