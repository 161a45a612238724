"""argv to one library call to an exit code."""
