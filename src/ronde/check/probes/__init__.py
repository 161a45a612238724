"""What reads facts of a host; one file a family, each run in a process of its own."""
