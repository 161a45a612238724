"""Hosts and links that let less through than the others."""

from collections.abc import Iterator

from ronde.check.bandwidth import SLOW_SHARE, SlowHost, judge_pairs
from ronde.check.check import Check, Family, Finding, Severity, name_pair
from ronde.check.facts import Fleet, Value
from ronde.check.families import pair_jobs

_RATES = "network.bandwidth"
_CRAWL_SHARE = 0.3
_MAX_NAMED = 4


def _judge_hosts(fleet: Fleet) -> Iterator[Finding]:
    for slow in judge_pairs(_rates_of(fleet)).hosts:
        severity = _grade(slow.rate, slow.usual)
        usual = f"{_spell(slow.usual)} between other hosts"
        yield Finding("slow-host-link", severity, slow.host, _tell(slow), usual)


def _judge_links(fleet: Fleet) -> Iterator[Finding]:
    for link in judge_pairs(_rates_of(fleet)).links:
        what = f"only {_spell(link.rate)} go through"
        usual = f"{_spell(link.usual)} between other hosts"
        fix = (
            f"ronde run -H {link.host},{link.other} ronde bench sendrecv -b 64M -e 64M "
            "shows what an engine reaches; see the cables and switches between the two."
        )
        where = name_pair(link.host, link.other)
        severity = _grade(link.rate, link.usual)
        yield Finding("slow-pair", severity, where, what, usual, fix)


def _rates_of(fleet: Fleet) -> dict[str, dict[str, Value]]:
    return {facts.host: facts.values[_RATES] for facts in fleet.having(_RATES)}


def _grade(rate: float, usual: float) -> Severity:
    return Severity.FAIL if rate < _CRAWL_SHARE * usual else Severity.WARN


def _tell(slow: SlowHost) -> str:
    limit = SLOW_SHARE * slow.usual
    if slow.sent < limit <= slow.received:
        told = f"it sends only {_spell(slow.sent)} to"
    elif slow.received < limit <= slow.sent:
        told = f"it receives only {_spell(slow.received)} from"
    else:
        told = f"only {_spell(slow.rate)} with"
    named = ", ".join(slow.partners[:_MAX_NAMED])
    num_more = len(slow.partners) - _MAX_NAMED
    return f"{told} {named}{f' and {num_more} more' if num_more > 0 else ''}"


def _spell(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


_NEEDS = "several hosts, and --bandwidth"
_SOURCE = (
    "NCCL's advice: more than 30 % off the median is an outlier; ronde's own: below "
    "30 % of it, training crawls"
)

CHECKS: tuple[Check, ...] = (
    Check(
        id="slow-host-link",
        family=Family.NETWORK,
        title="a host exchanges as much with the others as they do",
        reads="what comes through between each two hosts, each host's median: TCP "
        "streams both ways, or ronde bench all_reduce among the ranks of both",
        threshold=(
            "at least 70 % of the median of all hosts; below 30 % it fails; two hosts "
            "are not compared"
        ),
        source=_SOURCE,
        severity=Severity.FAIL,
        fix=(
            "ethtool and ip -s link show rate and errors there: see its cable, its "
            "port of the switch, and what the cloud grants its kind of machine. ronde "
            "run -H HOST,OTHER ronde bench sendrecv -b 64M -e 64M shows what an engine "
            "reaches."
        ),
        needs=_NEEDS,
        why="Gradients go through all hosts: the slowest sets the pace of every step.",
        facts=(_RATES,),
        judge=_judge_hosts,
    ),
    Check(
        id="slow-pair",
        family=Family.NETWORK,
        title="no two hosts exchange less than either does with the others",
        reads="what comes through between each two hosts: TCP streams both ways, or "
        "ronde bench all_reduce among the ranks of both",
        threshold=(
            "at least 70 % of the median of all pairs without a slow host; below 30 % "
            "it fails"
        ),
        source=_SOURCE,
        severity=Severity.FAIL,
        fix=(
            "See the way between the two: traceroute, and the switches on it. ronde "
            "run -H ONE,OTHER ronde bench sendrecv -b 64M -e 64M shows what an engine "
            "reaches."
        ),
        needs=_NEEDS,
        why="A ring that has the two as neighbours is as slow as they are.",
        facts=(_RATES,),
        judge=_judge_links,
    ),
    *pair_jobs.CHECKS,
)
