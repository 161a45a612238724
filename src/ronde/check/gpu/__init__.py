"""Checks of GPUs: presence, health, links and errors."""
