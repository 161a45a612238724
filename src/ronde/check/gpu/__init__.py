"""GPUs: whether they are there, healthy, free and well connected."""
