"""The program behind ``--hang-timeout``: it reports the first hang of a job."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from ronde.launch.status import watch
from ronde.monitor.asking import inspect_workers
from ronde.monitor.verdict import describe_hang, explain_hang, find_evidence


def main() -> None:
    """Print the verdict as JSON once a collective has waited for the time limit.

    The arguments are the socket of the job's table and the limit in seconds.
    """
    socket, limit_s = Path(sys.argv[3]), float(sys.argv[4])
    with suppress(OSError):  # the job is over
        for status in watch(socket):
            ages_s = [row.collective_age_s for row in status.workers]
            if max(ages_s, default=0.0) < limit_s:
                continue
            inspected = inspect_workers(status)
            verdict = explain_hang(inspected.status, inspected.inspections)
            if verdict.waits and verdict.waits[0].age_s >= limit_s:
                faults = [fault.text for fault in verdict.faults]
                faults += find_evidence(verdict, inspected.status, inspected.usages)
                text = " ".join([describe_hang(verdict), *faults])
                print(json.dumps(text), flush=True)  # noqa: T201
                return
