"""Nodes that join a job by themselves, where nothing can start an agent for them."""
