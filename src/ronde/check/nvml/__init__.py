"""What NVML is asked, and who answers: NVIDIA's driver, or a record of its answers."""
