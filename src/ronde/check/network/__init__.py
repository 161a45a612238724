"""Checks of the network: interfaces, RDMA ports, reachability, bandwidth."""
