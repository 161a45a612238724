"""The agent: owns the ranks of one host."""
