"""What one must open to follow a call, counted by ``files_per_call.py``."""

import subprocess
from pathlib import Path

from tests.launchers import launcher_environment, launcher_words
from tests.limits import HANG_S

SCRIPT = Path(__file__).with_name("files_per_call.py")
MOST = {"named_allreduce": 15, "gradient": 14}


def test_a_call_enters_few_files(tmp_path):
    done = subprocess.run(
        [*launcher_words("ronde", 2), str(SCRIPT), "--list"],
        env=launcher_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    counts = [line.split() for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert [name for name, _ in counts] == list(MOST)
    for name, count in counts:
        assert 5 < int(count) <= MOST[name], done.stdout
