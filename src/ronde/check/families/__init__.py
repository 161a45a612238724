"""What is judged; one file a family, each check with its source, threshold and fix."""
