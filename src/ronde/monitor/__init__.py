"""Looks into a running job: its hosts' observers, and the verdict on a hang."""
