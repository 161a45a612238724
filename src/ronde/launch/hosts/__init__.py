"""Which hosts, and how many ranks on each."""
