"""Paths between the elements of a host, and their bandwidth, as NCCL computes them."""
