"""The network between hosts: interfaces, RDMA ports, reachability, bandwidth."""
