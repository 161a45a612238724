"""Which cores, memory, GPUs and adapters each rank of a host gets."""
