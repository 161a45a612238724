"""Values to text."""
