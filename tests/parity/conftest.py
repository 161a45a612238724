import torch

# As in the ranks that this process is compared with; more would wait for each other.
torch.set_num_threads(1)
