"""How fast and how near the elements of a host are to one another, by NCCL's rules."""
