"""Jobs whose ranks and hosts come and go."""
