"""Which hosts, and how many ranks on each: from words to values."""
