"""Whether a host can be asked at all."""

from collections.abc import Iterator

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.fleet import Fleet

ABSENT = "absent"
"""Setting: by the name of a host that could not be asked, ``reason`` and ``cure``."""

TAKING_PART = "taking-part"


def _judge(fleet: Fleet) -> Iterator[Finding]:
    for host, why in fleet.settings.get(ABSENT, {}).items():
        yield Finding(
            TAKING_PART,
            Severity.FAIL,
            host,
            f"cannot be asked: {why['reason']}",
            fix=why["cure"],
        )


CHECKS = (
    Check(
        id=TAKING_PART,
        family=Family.CLUSTER,
        title="the host can be reached, and ronde starts there",
        reads="an agent started over ssh, srun or mpirun, as ronde run starts it, and "
        "its first answer",
        threshold="an answer within 30 s, from the same version of ronde and the same "
        "minor version of Python",
        source="ronde's own: what ronde run needs to start ranks there",
        severity=Severity.FAIL,
        fix="ssh HOST true, and look at what it says",
        needs="",
        why="ronde run starts nothing at all while one of its hosts is missing.",
        facts=(),
        judge=_judge,
    ),
)
