"""Checks of GPUs: present, healthy, free and well connected."""
