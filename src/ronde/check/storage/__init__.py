"""Folders and files: there, shared, and fast."""
