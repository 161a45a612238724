"""What can be wrong with a host of ``machines``; it is undone at a block's end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ronde.memory import list_groups

HALF_A_CPU = {
    "cpu.cfs_period_us": "100000",
    "cpu.cfs_quota_us": "50000",
    "cpu.max": "50000 100000",
}
"""Of a control group, by file: version 1 has the first two, version 2 the last."""

_CGROUPS = Path("/sys/fs/cgroup")


def find_cpu_groups() -> Path | None:
    """Return where control groups limit CPU time, if root can make some there.

    It is version 1's where that has the controller, else version 2's, which may lie
    beside version 1.
    """
    if os.access(_CGROUPS / "cpu" / "cpu.shares", os.W_OK):
        return _CGROUPS / "cpu"
    for top in (_CGROUPS, _CGROUPS / "unified"):
        enabled = top / "cgroup.subtree_control"
        # Where groups do not have it, to give it to them would change the machine.
        if os.access(enabled, os.W_OK) and "cpu" in enabled.read_text().split():
            return top
    return None


@contextmanager
def done_on(cluster, host, words, undo) -> Iterator[None]:
    """Do something on a host, and undo it at the end."""
    done = cluster.run(host, words)
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        undone = cluster.run(host, undo)
        assert undone.returncode == 0, undone.stderr


def replaced(cluster, host, path, by):
    """Have a host see another file or folder in the place of one."""
    # Programs of the host may still look into it when the test is over.
    words, undo = ["mount", "-n", "--bind", by, path], ["umount", "-n", "-l", path]
    return done_on(cluster, host, list(map(str, words)), list(map(str, undo)))


@contextmanager
def in_shell(cluster, host, script, undo) -> Iterator[None]:
    """Do something on a host by a shell, and undo it by another."""
    with done_on(cluster, host, ["sh", "-ec", script], ["sh", "-ec", undo]):
        yield


@contextmanager
def firewall(cluster, host, rule) -> Iterator[None]:
    """Have a host throw away what comes to it and matches a rule of nft's."""
    rules = (
        "add table inet planted; add chain inet planted input "
        "{ type filter hook input priority 0; }; "
        f"add rule inet planted input {rule} drop"
    )
    with done_on(
        cluster, host, ["nft", rules], ["nft", "delete", "table", "inet", "planted"]
    ):
        yield


@contextmanager
def limited(cluster, host, rate):
    """Have a host's link let less through, both ways."""
    cluster.slow_down(host, rate)
    try:
        yield
    finally:
        cluster.slow_down(host, cluster.rate)


@contextmanager
def narrowed(cluster, host, mtu):
    """Have the way to and from a host lose packets above a size, without a word."""
    cluster.narrow(host, mtu)
    try:
        yield
    finally:
        cluster.narrow(host, 1500)


@contextmanager
def grouped(cluster, host, limits) -> Iterator[Path]:
    """Have all that is started on a host through ssh run in a control group; give it.

    ``limits`` has the values of files; those of the other version are not there.
    """
    top = find_cpu_groups()
    assert top is not None
    # In version 2 no process may be in a group that has groups, but the root.
    own = map(Path, list_groups("", "cpu"))
    home = next(each for each in own if each.is_relative_to(top) and each.is_dir())
    name = top / f"planted-{os.getpid()}"
    begin = f"mkdir {name}; cat /run/sshd.pid >{name}/cgroup.procs; " + "; ".join(
        f"test ! -e {name}/{each} || echo {value} >{name}/{each}"
        for each, value in limits.items()
    )
    # It can be removed when nothing is in it any more.
    end = (
        f"while read -r pid; do echo $pid >{home}/cgroup.procs || true; done "
        f"<{name}/cgroup.procs; rmdir {name}"
    )
    with in_shell(cluster, host, begin, end):
        yield name


def altered(path, folder, old, new):
    """Return a copy of a file that is not quite the same."""
    text = path.read_text()
    assert old in text
    copy = folder / path.name
    copy.write_text(text.replace(old, new))
    return copy
