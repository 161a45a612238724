"""The agent: the process that runs the ranks of one host."""
