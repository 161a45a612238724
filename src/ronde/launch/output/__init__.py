"""Where the output and the events of a job go."""
