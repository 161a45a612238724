"""What shows only when hosts are compared."""
