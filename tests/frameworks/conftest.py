"""Tests of the front ends besides torch's; ``scripts/test_frameworks`` runs them."""

from importlib.util import find_spec

if not (find_spec("tensorflow") and find_spec("jax")):
    collect_ignore_glob = ["test_*.py"]
