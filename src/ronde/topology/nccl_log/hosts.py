"""Hosts of processes whose name was misread.

The very first message of a host may come glued to the end of a word, or its name may be
cut, when nobody can know where it begins. What the process says later tells.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ronde.topology.nccl_log.started import Process

_MAX_MISREAD = 3


def mend_hosts(processes: Iterable[Process]) -> None:
    """Give processes that were named a few times alone the host that they are of."""
    sure: dict[int, list[str]] = {}
    rare: dict[int, list[Process]] = {}
    for process in processes:
        if process.num_messages > _MAX_MISREAD:
            sure.setdefault(process.pid, []).append(process.host)
        else:
            rare.setdefault(process.pid, []).append(process)
    for pid, few in rare.items():
        if hosts := sure.get(pid):
            backwards = sorted(host[::-1] for host in hosts)
            for process in few:
                process.host = _own_host(process.host, backwards)


def _own_host(name: str, backwards: Sequence[str]) -> str:
    """Return the longest host that a name ends with, or the one host that ends with it.

    Args:
        name: As read.
        backwards: Names of hosts from their ends, in order.
    """
    end = name[::-1]
    for length in range(len(end), 0, -1):
        at = bisect_left(backwards, end[:length])
        if at < len(backwards) and backwards[at] == end[:length]:
            return end[:length][::-1]
    at = bisect_left(backwards, end)
    longer = [each for each in backwards[at : at + 2] if each.startswith(end)]
    return longer[0][::-1] if len(longer) == 1 else name
