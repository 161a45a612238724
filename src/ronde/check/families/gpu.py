"""Checks of GPUs; one module for each thing that they ask about."""

from ronde.check.families import (
    gpu_adapters,
    gpu_copies,
    gpu_fabric,
    gpu_health,
    gpu_links,
    gpu_presence,
    gpu_software,
    gpu_use,
)

CHECKS = (
    *gpu_presence.CHECKS,
    *gpu_software.CHECKS,
    *gpu_use.CHECKS,
    *gpu_health.CHECKS,
    *gpu_links.CHECKS,
    *gpu_adapters.CHECKS,
    *gpu_copies.CHECKS,
    *gpu_fabric.CHECKS,
)
