"""Who takes part: numbered views of a job's processes, and what decides on them."""
