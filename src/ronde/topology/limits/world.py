"""How many ranks there are, where, and what carries their bytes."""

from typing import NamedTuple

from ronde.topology.limits.formulas import Layout


class Rate(NamedTuple):
    """What links carry together, in one direction.

    Attributes:
        link: Their name with their rate, for people: ``eth0, 3.125 GB/s``.
        gb_per_s: What the hardware carries.
        practical_gb_per_s: What NCCL counts on; None where it does not differ.
        note: What is to be said where they bind.
    """

    link: str
    gb_per_s: float
    practical_gb_per_s: float | None = None
    note: str = ""

    def pick(self, *, is_practical: bool) -> float:
        """Return the one figure or the other."""
        if is_practical and self.practical_gb_per_s is not None:
            return self.practical_gb_per_s
        return self.gb_per_s


class Islands(NamedTuple):
    """GPUs of a node that NVLink joins to some of the node's others, and not to all.

    Attributes:
        num_gpus: Of each.
        way_out: PCIe links of an island together.
    """

    num_gpus: int
    way_out: Rate


class World(NamedTuple):
    """Ranks on nodes that are alike.

    What a field does not have, None, either is not there or does not count; what
    counts and is not known is named in ``unknown``.

    Attributes:
        layout: Where the ranks are.
        network: All network links of a node together.
        path: The best one of them.
        gpu: The way out of each GPU to the others of its node.
        islands: Where NVLink does not join all GPUs of a node.
        memory: What a node's memory reads and writes together.
        has_gpus: Ranks are on GPUs, and NCCL carries their bytes.
        has_nvls: The NVLink switches may reduce.
        unknown: What may bind and has no known rate, each as a clause.
    """

    layout: Layout
    network: Rate | None = None
    path: Rate | None = None
    gpu: Rate | None = None
    islands: Islands | None = None
    memory: Rate | None = None
    has_gpus: bool = False
    has_nvls: bool = False
    unknown: tuple[str, ...] = ()

    def lacking(self, reason: str) -> "World":
        """Return the same world, of which one thing more is not known, if any."""
        return self._replace(unknown=(*self.unknown, reason)) if reason else self
