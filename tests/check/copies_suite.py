"""The form of a GPU's measured copies."""

RATES = ("host_to_device_gb_per_s", "device_to_host_gb_per_s", "device_memory_gb_per_s")


def check_copies(copies):
    """All of a GPU's copies take some time, and it has a model."""
    assert copies.keys() == {"model", "is_near", *RATES}
    assert copies["model"]
    assert isinstance(copies["is_near"], bool)
    assert all(0 < copies[rate] < 1e6 for rate in RATES)
