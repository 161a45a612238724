"""What ran when, taken down on each rank while it runs."""
