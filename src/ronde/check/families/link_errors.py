"""Errors that links count while hosts are looked at."""

from collections.abc import Iterator, Mapping

from ronde.check.check import Check, Family, Finding, Severity
from ronde.check.fleet import Fleet
from ronde.check.probes.counters import RDMA_ERRORS

RDMA_GROWTH = "network.rdma_error_growth"
"""Fact: by RDMA port and counter how many errors came; without those that did not."""

_WHEN = (
    "read by the probes, and again at the end, behind what --bandwidth and --burn send"
)


def _judge_ports(fleet: Fleet) -> Iterator[Finding]:
    for facts in fleet.having(RDMA_GROWTH):
        grown: Mapping[str, Mapping[str, int]] = facts.values[RDMA_GROWTH]
        for port, counts in grown.items():
            told = ", ".join(f"{name} by {count}" for name, count in counts.items())
            what = f"{port}: {told} more while it was looked at"
            yield Finding("rdma-errors", Severity.WARN, facts.host, what)


CHECKS = (
    Check(
        id="rdma-errors",
        family=Family.NETWORK,
        title="RDMA ports count no errors",
        reads="symbol_error, link_error_recovery, link_downed, port_rcv_errors and "
        "local_link_integrity_errors of counters, and out_of_sequence, packet_seq_err, "
        "local_ack_timeout_err and rnr_nak_retry_err of hw_counters, in "
        f"/sys/class/infiniband/*/ports/*, {_WHEN}; not of virtual functions",
        threshold="none grows meanwhile; with --since, growth since then is told among "
        "the facts that have changed",
        source="ronde's own: a link in order counts none in seconds",
        severity=Severity.WARN,
        fix="The first five: clean or replace cable and transceiver (ibdiagnet, "
        "mlxlink -d ADAPTER -c). The others, with RoCE: look at PFC and ECN of the "
        "adapter and of the switches: packets are lost.",
        needs="an RDMA adapter",
        why="What is lost is sent again after a time-out: single steps take long.",
        facts=(RDMA_ERRORS, RDMA_GROWTH),
        judge=_judge_ports,
    ),
)
