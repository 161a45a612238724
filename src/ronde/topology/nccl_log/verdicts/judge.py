"""All rules, and a log by them."""

from collections.abc import Iterator

from ronde.topology.findings import Finding, Severity
from ronde.topology.nccl_log.log import NcclLog
from ronde.topology.nccl_log.verdicts import marked, network, node, ranks

RULES = (
    network.sockets_used,
    network.libfabric_over_tcp,
    network.networks_differ,
    network.no_gpudirect,
    network.virtual_interfaces,
    node.shared_memory_used,
    node.peers_refused,
    node.few_channels,
    node.nvls_lost,
    node.fabric_not_ready,
    node.slow_pci,
    ranks.versions_differ,
    ranks.settings_differ,
    ranks.nodes_unlike_hosts,
    ranks.init_incomplete,
    ranks.ranks_not_in_log,
    ranks.slow_init,
    marked.marked_warnings,
)
_ORDER = tuple(Severity)


def judge_nccl_log(log: NcclLog) -> tuple[Finding, ...]:
    """Return what looks wrong in a log, the most severe first.

    What the log does not say is never taken for a fault.
    """
    found = [finding for job in log.jobs for rule in RULES for finding in rule(job)]
    if log.num_lost:
        found = [_doubt(finding, log.num_lost) for finding in found]
    found += _of_the_log(log)
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))


def _doubt(finding: Finding, num_lost: int) -> Finding:
    """Return what is found by something not being said, where lines were lost."""
    if finding.rule != "init-incomplete":
        return finding
    lines = "line was" if num_lost == 1 else "lines were"
    return finding._replace(
        severity=Severity.WARNING,
        what=f"{finding.what} {num_lost} {lines} lost where the log broke, and may "
        "have said it.",
    )


def _of_the_log(log: NcclLog) -> Iterator[Finding]:
    if len(log.loose_versions) > 1:
        yield Finding(
            rule="several-versions",
            severity=Severity.NOTE,
            element="log",
            what=f"Several versions are named: {', '.join(log.loose_versions[:5])}.",
            consequence="If they are of one job, its ranks do not fit together.",
            remedy="Give the log of one job at a time.",
        )
    if log.num_lost or log.num_left_out:
        yield Finding(
            rule="log-incomplete",
            severity=Severity.NOTE,
            element="log",
            what=f"{log.num_lost} lines were broken and could not be put together; "
            f"{log.num_left_out} things were too many to keep.",
            consequence="What they said is missing here.",
            remedy="Let every rank write a file of its own: "
            "NCCL_DEBUG_FILE=nccl.%h.%p.",
        )
