"""Parameters to buckets to reductions, overlapped with backward."""
