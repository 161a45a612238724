"""Stands in for torchvision where it is not installed."""
