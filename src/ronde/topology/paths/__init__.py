"""Paths between the elements of a host, and their bandwidth, by NCCL's rules."""
