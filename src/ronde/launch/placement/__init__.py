"""Cores, GPUs and network addresses of the ranks, chosen before they start."""
