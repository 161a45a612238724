"""What whoever measures copies of a GPU must tell of it."""

import re

RATES = (
    "host_to_device_gb_per_s",
    "device_to_host_gb_per_s",
    "device_memory_gb_per_s",
)
LINK = ("width", "max_width", "generation", "max_generation")


def check_copies(copies):
    """All of a GPU's copies take some time, and it has a model."""
    assert copies.keys() == {"model", "is_near", *RATES}
    assert copies["model"]
    assert isinstance(copies["is_near"], bool)
    assert all(0 < copies[rate] < 1e6 for rate in RATES)


def check_link(link):
    """A link that is told has lanes, no more than are possible, and an address."""
    assert link.keys() == {"address", *LINK}
    assert re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.0", link["address"])
    assert 1 <= link["width"] <= link["max_width"] <= 32
    assert 1 <= link["generation"] <= link["max_generation"] <= 9
