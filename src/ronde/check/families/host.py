"""What of a host, apart from its GPUs and its network, makes training fail or crawl."""

from ronde.check.families import host_activity, host_kernel, host_limits, host_memory

CHECKS = (
    *host_limits.CHECKS,
    *host_memory.CHECKS,
    *host_kernel.CHECKS,
    *host_activity.CHECKS,
)
