"""A bound on the busbw of a collective, with the link that sets it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """The busbw that no algorithm can exceed on what was found.

    Attributes:
        bus_bandwidth_gb_per_s: The bound.
        link: What binds, with its rate, such as ``eth0, 3.125 GB/s``.
        note: When the bound may be exceeded all the same, or where it is uncertain.
        practical_gb_per_s: The same bound by the figures that NCCL counts on; None
            where NCCL takes no part.
        practical_link: What binds then.
    """

    bus_bandwidth_gb_per_s: float
    link: str
    note: str = ""
    practical_gb_per_s: float | None = None
    practical_link: str = ""

    def percent(self, busbw_gb_per_s: float) -> float:
        """Return a busbw in percent of the bound; above 100 an assumption is wrong."""
        return 100.0 * busbw_gb_per_s / self.bus_bandwidth_gb_per_s

    def doubt(self, busbw_gb_per_s: float) -> str:
        """Return what a busbw says against the bound; empty up to 100 %."""
        if busbw_gb_per_s <= self.bus_bandwidth_gb_per_s:
            return ""
        return (
            f"{self.percent(busbw_gb_per_s):.0f} % of the bound: something that it "
            f"takes for granted is wrong, such as {self._suspects}"
        )

    @property
    def _suspects(self) -> str:
        if self.link.startswith("memory"):
            return "that the data does not fit into the caches"
        return "that no switch reduces (NVLS, SHARP), or the number or rate of links"
