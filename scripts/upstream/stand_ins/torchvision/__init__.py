"""Stands in for torchvision, which would download data."""
