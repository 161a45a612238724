"""Hosts: their sources, connections and agents."""
