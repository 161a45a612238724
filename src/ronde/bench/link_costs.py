"""Latency and bandwidth of a sweep, fitted as those of a ring."""

from collections.abc import Sequence
from typing import Any

from ronde.bench.results import Heading, Row
from ronde.collectives.fitting import fit_link
from ronde.errors import UsageError

_ROUND_TRIPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def fit_rows(heading: Heading, rows: Sequence[Row]) -> dict[str, Any]:
    """Return facts of a record: the hosts, and the ring's costs or ``no_fit``.

    Rows of the first row's type and operation count, in place if that was measured.
    """
    hosts, test = list(heading.hosts), heading.options.test.name
    trips, size = _ROUND_TRIPS.get(test, 0), heading.size
    if size < 2 or not trips:
        return {"hosts": hosts, "fit": None, "no_fit": f"no ring of {size} has {test}"}
    points = [
        (row.size_bytes, side.time_us / 1e6)
        for row in rows
        if (row.dtype, row.redop) == (rows[0].dtype, rows[0].redop)
        if (side := row.in_place or row.out_of_place) and side.is_measured
        if side.time_us
    ]
    sizes, seconds = [each[0] for each in points], [each[1] for each in points]
    try:
        fit = fit_link(sizes, seconds, trips * (size - 1), trips * (size - 1) / size)
    except UsageError as error:
        return {"hosts": hosts, "fit": None, "no_fit": str(error)}
    level = "between" if max(hosts) == 1 else "mixed"
    found = {
        "level": "inside" if len(hosts) == 1 else level,
        "alpha_us": fit.alpha_s * 1e6,
        "beta_ns_per_byte": fit.beta_s_per_byte * 1e9,
        "largest_residual": fit.largest_residual,
    }
    return {"hosts": hosts, "fit": found}
