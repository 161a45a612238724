"""Fixtures of the tests of serving."""

import random

import pytest


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20261130)
