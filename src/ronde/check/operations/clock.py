"""What a host's clock says."""

import time

from ronde.check.facts import Value
from ronde.check.operations.site import Site


def clock(site: Site, question: dict[str, Value]) -> dict[str, Value]:  # noqa: ARG001
    """Tell the time: ``time_ns``, since 1970."""
    return {"time_ns": time.time_ns()}
