"""The key-value store that the ranks of a job meet in, without any framework."""
