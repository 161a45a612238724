"""Loading of batches."""
