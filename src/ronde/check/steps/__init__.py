"""What the head asks the programs on all hosts, step by step; one file a subject."""
