"""What differs between NCCL's releases in how they see a host.

Source: ``src/graph`` of NCCL, tags v2.18.1-1 to v2.30.7-1, compared with one another.
"""

import re
from typing import NamedTuple

from ronde.errors import UsageError

_RELEASE = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?:[+-].*)?", re.DOTALL
)
_NEWEST_PATCH = 99


class NcclRules(NamedTuple):
    """How one release of NCCL counts; two releases compare by their numbers.

    Attributes:
        major: Always 2.
        minor: 18 to 30.
        patch: Third number.
    """

    major: int
    minor: int
    patch: int

    @property
    def sm90_gb_per_s(self) -> float:
        """Of one NVLink of a GPU with compute capability 9."""
        return 20.6 if self >= (2, 20, 0) else 20.0

    @property
    def sm100_gb_per_s(self) -> float:
        """Of one NVLink of a GPU with compute capability 10 or more."""
        if self >= (2, 27, 5):
            return 40.1
        return 40.0 if self >= (2, 25, 0) else self.sm90_gb_per_s

    @property
    def limits_amd_sockets(self) -> bool:
        """Whether there is a limit between AMD's processors."""
        return self >= (2, 19, 0)

    @property
    def tells_intel_apart(self) -> bool:
        """Whether Intel's newer processors, since Sapphire Rapids, count for more."""
        return self >= (2, 26, 0)

    @property
    def has_c2c(self) -> bool:
        """Whether C2C is a kind of its own; before, it counts as NVLink."""
        return self >= (2, 26, 0)

    @property
    def has_p2c(self) -> bool:
        """Whether adapters are near a GPU whose processor they share through C2C."""
        return self >= (2, 27, 0)

    @property
    def flattens_gen5(self) -> bool:
        """Whether Broadcom's PCIe 5 switches become one, as those of PCIe 4 do."""
        return self >= (2, 20, 0)

    @property
    def has_device_vertex(self) -> bool:
        """Whether a GPU has one more vertex between itself and its links."""
        return self >= (2, 30, 0)

    @property
    def prefers_kind(self) -> bool:
        """Whether a nearer kind replaces what was found in fewer hops."""
        return self >= (2, 30, 5)

    @property
    def avoids_sockets(self) -> bool:
        """Whether GPUs reach one another through processors only on small AMD hosts.

        Before, they do wherever the processors are neither Intel's, Zhaoxin's nor ARM.
        """
        return self >= (2, 23, 0)

    @property
    def relays_need_gdr(self) -> bool:
        """Whether a GPU passes on to an adapter only where that has GPUDirect RDMA."""
        return self >= (2, 30, 0)

    @property
    def shares_by_near_gpus(self) -> bool:
        """Whether GPUs share adapters by their place among those near; else by number.

        The place is the number modulo how many are near.
        """
        return self >= (2, 30, 5)


def rules_of(version: str) -> NcclRules:
    """Return the rules of a release: ``2.27.3``, ``2.29.7+cuda13.2``.

    ``2.27`` stands for the last release of that line.

    Raises:
        UsageError: It is none from 2.18 to 2.30.
    """
    match = _RELEASE.fullmatch(version.strip())
    if match and (2, 18) <= (int(match[1]), int(match[2])) <= (2, 30):
        patch = int(match[3]) if match[3] else _NEWEST_PATCH
        return NcclRules(int(match[1]), int(match[2]), patch)
    raise UsageError(
        f"NCCL's version must be one from 2.18 to 2.30, got {version!r}. Give the "
        "nearest of them: 2.30"
    )


LATEST = NcclRules(2, 30, 7)
"""The newest release that these rules were compared with."""
