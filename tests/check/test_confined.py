"""``ronde check`` where little may be read: no capabilities, no /sys, no network."""

import json
import subprocess
import sys

import pytest
from tests.limits import HANG_S
from tests.namespaces import why_not

PREPARE = """
mount -t proc proc /proc
mount -t tmpfs none /sys
mount -t tmpfs -o size=64m none /dev/shm
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


def check(*words):
    space = ["unshare", "--mount", "--pid", "--fork", "--net", "--uts"]
    confined = [*space, "sh", "-ec", PREPARE, "sh"]
    if reason := why_not(confined):
        pytest.skip(reason)
    command = [sys.executable, "-m", "ronde", "check", *words]
    return subprocess.run(
        [*confined, *command], capture_output=True, timeout=HANG_S, check=False
    )


def test_unreadable_facts_are_no_fault():
    done = check("--json")
    reported = json.loads(done.stdout)
    assert done.stderr == b""
    failed = {f["check"] for f in reported["findings"] if f["severity"] == "fail"}
    # A new container has a small /dev/shm, which is a fault.
    assert failed == {"shared-memory"}
    assert done.returncode == 2
    (unread,) = {
        u["reason"] for u in reported["unread"] if "/sys/class/net" in u["reason"]
    }
    assert "No such file" in unread
