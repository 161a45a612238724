"""Each host against each other: what goes through, and which host or link is slow.

Hosts meet in pairs, as in a tournament; the pairs of a round are disjoint, so that all
of them can be measured at the same time.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from ronde.check.check import (
    FAIL,
    WARN,
    Fleet,
    HostPair,
    Problem,
    Problems,
    Severity,
    Value,
    check,
    name_pair,
    name_some,
)
from ronde.check.hosts import HostSet, ProbeStep
from ronde.check.network.pair_jobs import (
    FAILURES,
    RATES,
    REMARKS,
    WAY,
    Benches,
    PairRates,
)

# By receiver, then by sender: what came through, in gigabytes (1e9) per second.
Rates = Mapping[str, Mapping[str, float]]
# Below these shares of the median a host or a link is slow, and crawls.
_SLOW_SHARE, _CRAWL_SHARE = 0.7, 0.3
_GPUS = ("gpu.count", "versions.torch_build")
_NO_ROUTE = "no other host has a route to it"
_STREAM_S, _LISTEN_S, _TIMEOUT_S = 0.3, 5.0, 10.0


class SlowHost(NamedTuple):
    """A host that is slow with most others; medians over its partners, in GB/s."""

    host: str
    # Of the lower of both directions.
    rate: float
    sent: float
    received: float
    # What pairs without a slow host have.
    usual: float
    # With whom it is slow, the slowest first.
    partners: tuple[str, ...]


class SlowLink(NamedTuple):
    """Two hosts that are slow with each other alone; the lower direction, in GB/s."""

    host: str
    other: str
    rate: float
    usual: float


class SlowHosts(NamedTuple):
    """The result of a tournament: slow hosts, and slow links between others."""

    hosts: tuple[SlowHost, ...]
    links: tuple[SlowLink, ...]


class Streams:
    """Plain TCP, both ways at the same time, between ports of ``visits.listen``.

    It shows links, switches and hosts that are slower than others. What NCCL or an RDMA
    adapter reaches it does not show, and on fast links copying may be the limit.
    """

    max_rounds = 32

    def __init__(self) -> None:
        self._places: dict[str, dict[str, Value]] = {}

    def open(self, hosts: HostSet) -> Mapping[str, str]:
        """Have the hosts listen; return those that cannot take part, and why."""
        replies = hosts.ask_all({"do": "listen"}, _LISTEN_S)
        for name, reply in replies.items():
            if not reply.failure:
                port, token = reply.values["ports"][0], reply.values["token"]
                place = {"address": hosts.addresses[name], "port": port, "token": token}
                self._places[name] = place
        return {n: reply.failure for n, reply in replies.items() if reply.failure}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        """Have each pair send to each other for a fixed time."""
        common = {"do": "stream", "seconds": _STREAM_S}
        ways = [way for pair in pairs for way in (pair, pair[::-1])]
        questions = {one: {**common, **self._places[other]} for one, other in ways}
        replies = hosts.ask(questions, _TIMEOUT_S)
        found: dict[HostPair, PairRates] = {}
        for pair in pairs:
            one, other = (replies[host] for host in pair)
            if failure := one.failure or other.failure:
                found[pair] = PairRates(failure=failure)
            else:
                rates = other.values["gb_per_s"], one.values["gb_per_s"]
                found[pair] = PairRates(rates)
        return found


def rounds(hosts: Sequence[str]) -> Iterator[tuple[HostPair, ...]]:
    """Yield rounds of disjoint pairs, until all have met: the circle method."""
    places: list[str | None] = [*hosts]
    if len(places) % 2:
        places.append(None)
    half = len(places) // 2
    for _ in range(len(places) - 1):
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple((a, b) for a, b in facing if a is not None and b is not None)
        places.insert(1, places.pop())


def judge_pairs(rates: Rates) -> SlowHosts:
    """Return who is slow; pairs of which one direction is missing do not count.

    A pair is as fast as the slower of its directions. A host is slow where the median
    over its partners is below a share of the median of all hosts' medians: one slow
    link does not make it that, as long as it has three partners. The links of slow
    hosts are not listed again; each other link is compared with what is usual then.
    """
    pairs = {
        (a, b): min(rates[a][b], rates[b][a])
        for a, b in combinations(rates, 2)
        if b in rates[a] and a in rates[b]
    }
    met: dict[str, dict[str, float]] = {}
    for (a, b), rate in pairs.items():
        met.setdefault(a, {})[b] = rate
        met.setdefault(b, {})[a] = rate
    if not met:
        return SlowHosts((), ())
    medians = {host: median(partners.values()) for host, partners in met.items()}
    middle = median(medians.values())
    slow = [host for host in met if medians[host] < _SLOW_SHARE * middle]
    others = {p: rate for p, rate in pairs.items() if not {*slow}.intersection(p)}
    # Slow hosts draw down the medians of the others, all the more the fewer they are.
    usual = max(middle, median(others.values())) if others else middle
    limit = _SLOW_SHARE * usual
    described: list[SlowHost] = []
    for host in slow:
        sent = median(rates[other][host] for other in met[host])
        received = median(rates[host][other] for other in met[host])
        by_rate = sorted(met[host], key=met[host].__getitem__)
        partners = tuple(other for other in by_rate if met[host][other] < limit)
        described.append(SlowHost(host, medians[host], sent, received, usual, partners))
    links = (SlowLink(*p, rate, usual) for p, rate in others.items() if rate < limit)
    return SlowHosts(tuple(described), tuple(links))


def run(hosts: HostSet) -> None:
    """Have the hosts meet in pairs, where there are several.

    All pairs of a round are measured at the same time, as a job would load the network.
    Who is slow is measured once more: a busy moment is no slow link.
    """
    if len(hosts.names) < 2:
        return
    engine = _choose_engine(hosts)
    way = Streams() if engine == "tcp" else Benches(engine, _num_ranks(hosts, engine))
    for name in hosts.names:
        hosts.note(name, RATES, {})
        hosts.note(name, FAILURES, {})
        hosts.note(name, WAY, engine)
        if engine == "nccl":
            hosts.note(name, REMARKS, {})
    failures = {n: "" if a else _NO_ROUTE for n, a in hosts.addresses.items()}
    failures |= {n: failures[n] or failure for n, failure in way.open(hosts).items()}
    for name, failure in failures.items():
        if failure:
            hosts.note_unread(name, RATES, failure)
    schedule = list(rounds([name for name, failure in failures.items() if not failure]))
    # What is left out is spread over the schedule.
    played = schedule[:: max(1, -(-len(schedule) // way.max_rounds))]
    for pairs in played:
        _play(hosts, way, pairs)
    rates = {name: facts.values[RATES] for name, facts in hosts.facts.items()}
    slow, links = judge_pairs(rates)
    suspected = [
        *({each.host, partner} for each in slow for partner in each.partners),
        *({each.host, each.other} for each in links),
    ]
    for pairs in played:
        _play(hosts, way, [pair for pair in pairs if {*pair} in suspected])
    for name, facts in hosts.facts.items():
        if not facts.values[RATES]:
            del facts.values[RATES]
            reasons = [*facts.values[FAILURES].values(), "no other host was met"]
            hosts.note_unread(name, RATES, facts.unreadable.get(RATES, reasons[0]))


def _choose_engine(hosts: HostSet) -> str:
    """Return what the user asked for; ``auto`` is NCCL where all hosts have it."""
    asked = str(hosts.settings["bandwidth"])
    if asked != "auto":
        return asked
    is_nccl = all(
        int(each.values.get(_GPUS[0]) or 0) > 0
        and str(each.values.get(_GPUS[1])).startswith(("CUDA", "HIP"))
        for each in hosts.facts.values()
    )
    return "nccl" if is_nccl else "tcp"


def _num_ranks(hosts: HostSet, engine: str) -> int:
    """Return how many ranks a host has in a job of two: of NCCL one a GPU at most."""
    wanted = int(hosts.settings.get("num_ranks") or 0)
    if engine == "gloo":
        return wanted or 1
    fewest = min(int(f.values.get(_GPUS[0]) or 0) for f in hosts.facts.values())
    return max(1, min(wanted or fewest, fewest))


def _play(hosts: HostSet, way: Streams | Benches, pairs: Sequence[HostPair]) -> None:
    """Measure disjoint pairs; the better of two measurements stays."""
    if not pairs:
        return
    for pair, measured in way.measure(hosts, pairs).items():
        ends = zip(pair, pair[::-1], measured.rates, strict=True)
        for one, other, rate in ends:
            known: dict[str, Value] = hosts.facts[one].values
            if measured.remarks:
                known[REMARKS] = {**measured.remarks, **known[REMARKS]}
            if measured.failure:
                known[FAILURES][other] = measured.failure
            else:
                known[RATES][other] = max(rate, known[RATES].get(other, 0.0))


STEP = ProbeStep(
    "bandwidth", run, (RATES, FAILURES, WAY, REMARKS), _GPUS, setting="bandwidth"
)


def _grade(rate: float, usual: float) -> Severity:
    return FAIL if rate < _CRAWL_SHARE * usual else WARN


def _show(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


@check(FAIL, RATES)
def slow_host_link(fleet: Fleet) -> Problems:
    """A host exchanges as much with the others as they do.

    reads: what comes through between each two hosts: TCP both ways, or ronde bench
    threshold: 70 % of the median of all hosts; below 30 % it fails; three or more hosts
    source: NCCL's advice: over 30 % off the median is an outlier; 30 %: ronde's own
    fix: ethtool and ip -s link show rate and errors there: look at its cable, its port
        of the switch, and what the cloud grants its kind of machine. ronde run -H
        HOST,OTHER ronde bench sendrecv -b 64M -e 64M shows what an engine reaches.
    needs: several hosts, and --bandwidth
    why: Gradients go through all hosts: the slowest sets the pace of every step.
    """
    for slow in judge_pairs(fleet.known(RATES)).hosts:
        limit = _SLOW_SHARE * slow.usual
        if slow.sent < limit <= slow.received:
            what = f"it sends only {_show(slow.sent)} to"
        elif slow.received < limit <= slow.sent:
            what = f"it receives only {_show(slow.received)} from"
        else:
            what = f"only {_show(slow.rate)} with"
        yield Problem(
            f"{what} {name_some(list(slow.partners))}",
            _grade(slow.rate, slow.usual),
            f"{_show(slow.usual)} between other hosts",
            host=slow.host,
        )


@check(FAIL, RATES)
def slow_pair(fleet: Fleet) -> Problems:
    """No two hosts exchange less than either does with the others.

    reads: what comes through between each two hosts, as for slow-host-link
    threshold: 70 % of the median of pairs without a slow host; below 30 % it fails
    source: as for slow-host-link
    fix: Look at the way between the two: traceroute, and the switches on it. ronde run
        -H ONE,OTHER ronde bench sendrecv -b 64M -e 64M shows what an engine reaches.
    needs: several hosts, and --bandwidth
    why: A ring that has the two as neighbours is as slow as they are.
    """
    for link in judge_pairs(fleet.known(RATES)).links:
        fix = (
            f"ronde run -H {link.host},{link.other} ronde bench sendrecv -b 64M -e 64M "
            "shows what an engine reaches; look at cables and switches between them."
        )
        yield Problem(
            f"only {_show(link.rate)} go through",
            _grade(link.rate, link.usual),
            f"{_show(link.usual)} between other hosts",
            fix,
            name_pair(link.host, link.other),
        )
