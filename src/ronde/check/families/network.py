"""All checks of the network, but for its bandwidth."""

from ronde.check.families import (
    network_interfaces,
    network_names,
    network_rdma,
    network_reach,
)

CHECKS = (
    *network_names.CHECKS,
    *network_interfaces.CHECKS,
    *network_reach.CHECKS,
    *network_rdma.CHECKS,
)
