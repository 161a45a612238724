"""Named tensors from all ranks agree on what runs next: Horovod's semantics."""
