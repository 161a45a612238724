"""The hosts of an elastic job, as Horovod's ``HostManager`` has them."""

import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import NamedTuple

from ronde.launch.hosts.sources import merge_repeated, parse_lines
from ronde.membership.events import HostGone
from ronde.membership.policy import Membership, Rules
from ronde.torch.elastic.state import HostUpdateResult

__all__ = [
    "DiscoveredHosts",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "HostManager",
    "HostUpdateResult",
    "cooldown_of",
]

_COOLDOWN_S = (1, 3600)  # least and most, Horovod's


class HostDiscovery:
    """Knows the hosts that workers may run on."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the number of slots of each host, in their order."""
        raise NotImplementedError


class FixedHosts(HostDiscovery):
    """Hosts that are given, and given anew by ``set``."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = host_slots

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return self._host_slots

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Set what the next look will find."""
        self._host_slots = host_slots


class HostDiscoveryScript(HostDiscovery):
    """Hosts that a command prints, as in a host file; ``slots`` where one has none.

    Raises:
        RuntimeError: The command failed.
        UsageError: It printed something else.
    """

    def __init__(self, discovery_script: str, slots: int) -> None:
        self._discovery_script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        printed = self._execute_discovery_script()
        if not printed.strip():
            return {}
        lines = parse_lines(printed, f"discovery script {self._discovery_script}")
        hosts, _ = merge_repeated(lines, is_counted=False)
        default = self._default_slots
        return {each.name: default if each.slots < 0 else each.slots for each in hosts}

    def _execute_discovery_script(self) -> str:
        command = self._discovery_script
        result = subprocess.run(  # noqa: S602  horovodrun takes a command line
            command, shell=True, stdout=subprocess.PIPE, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(
                f"Failed to execute discovery script: {command}. Exit code: "
                f"{result.returncode}"
            )
        return result.stdout


class DiscoveredHosts(NamedTuple):
    """The hosts at one time."""

    host_slots: Mapping[str, int]  # those that are blacklisted, too
    host_assignment_order: Sequence[str]

    @property
    def available_hosts(self) -> set[str]:
        """Hosts that may be used."""
        return set(self.host_assignment_order)

    def get_slots(self, host: str) -> int:
        """Return a host's slots."""
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Return the slots of all hosts that may be used."""
        return sum(map(self.get_slots, self.host_assignment_order))


class HostManager:
    """The hosts that are found, without those that are blacklisted after a failure.

    ``cooldown_range`` is how many seconds one is left out, the first time and at most;
    for good without.
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        cooldown_range: Sequence[int] | None = None,
        membership: Membership | None = None,
    ) -> None:
        rules = Rules(1, sys.maxsize, cooldown_s=cooldown_of(cooldown_range))
        self._membership = membership or Membership(rules, str)
        self._discovery = discovery
        self._found: dict[str, int] = {}
        self._blacklisted: Collection[str] = ()  # when they were last looked for

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """Hosts as they were found last."""
        left_out = self._membership.blacklisted(time.monotonic())
        order = [name for name in self._found if name not in left_out]
        return DiscoveredHosts(self._found, order)

    def find_hosts(self) -> Mapping[str, int]:
        """Return what ``take`` is to have; this may take time."""
        return self._discovery.find_available_hosts_and_slots()

    def take(self, found: Mapping[str, int]) -> HostUpdateResult:
        """Return what has changed; a host that is usable again counts as added."""
        before, left_out = self._found, self._membership.blacklisted(time.monotonic())
        result = HostUpdateResult.no_update
        for name in {**before, **found}:
            slots = found.get(name, 0)
            is_back = name in self._blacklisted and name not in left_out
            if slots < before.get(name, 0):
                result |= HostUpdateResult.removed
            elif slots > before.get(name, 0) or is_back:
                result |= HostUpdateResult.added
        order = self.order_available_hosts(found, list(before))
        self._found, self._blacklisted = {name: found[name] for name in order}, left_out
        return result

    def update_available_hosts(self) -> HostUpdateResult:
        """Look for hosts; return what has changed."""
        return self.take(self.find_hosts())

    def blacklist(self, host: str) -> None:
        """Leave out a host, as after a failure."""
        self._membership.apply(HostGone(host, "it is blacklisted"), time.monotonic())

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a host is not used for now."""
        return host in self._membership.blacklisted(time.monotonic())

    @staticmethod
    def order_available_hosts(
        available_hosts: Collection[str], prev_host_assignment_order: Sequence[str]
    ) -> list[str]:
        """Return known hosts in their order, and new ones after them."""
        known = [name for name in prev_host_assignment_order if name in available_hosts]
        return [*known, *(name for name in available_hosts if name not in known)]


def cooldown_of(bounds: Sequence[int] | None) -> tuple[float, float]:
    """Return for how many seconds more a host is not used."""
    if bounds is None:
        return inf, inf
    low, high = bounds
    least, most = _COOLDOWN_S
    if not least <= low <= high <= most:
        raise ValueError(
            f"cooldown_range must be ascending and within {least}..{most} s, got {low} "
            f"and {high}. Correct it."
        )
    return low, high
