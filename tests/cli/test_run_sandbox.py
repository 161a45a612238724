"""Where the kernel shows less of itself than elsewhere, programs run all the same."""

import subprocess
import sys

import pytest
from tests.namespaces import why_not

from ronde.world.machine import boot_identity, network_identity

HIDE = 'mount -t tmpfs none /proc/sys && exec "$@"'
PROGRAM = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"


def in_sandbox(*words):
    """Run words where ``/proc/sys`` is empty."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", HIDE, "sh"]
    if reason := why_not(space):
        pytest.skip(reason)
    return subprocess.run(
        [*space, *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_ranks_run_where_the_boot_has_no_name():
    command = (sys.executable, "-m", "ronde", "run", "-n", "2", "--no-prefix", "--")
    done = in_sandbox(*command, sys.executable, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_processes_of_one_machine_agree_on_it():
    code = "from ronde.world.machine import *; print(network_identity())"
    words = (sys.executable, "-c", code)
    here = subprocess.run(words, capture_output=True, text=True, check=True)
    assert here.stdout.strip() == network_identity()
    hidden = in_sandbox(*words)
    assert hidden.returncode == 0, hidden.stderr
    assert hidden.stdout.strip().rpartition("/")[2] == network_identity().split("/")[1]
    assert boot_identity() not in hidden.stdout
