"""Each host against each other: what goes through, and which host or link is slow.

Hosts meet in pairs, as in a tournament; the pairs of a round are disjoint, so that all
of them can be measured at the same time: by plain streams, or by a job of all ranks of
two hosts.
"""

import base64
import io
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from ronde.bench.results import Run, from_record
from ronde.check.check import (
    FAIL,
    INFORM,
    WARN,
    Problem,
    Problems,
    check,
    each_host,
    name_pair,
)
from ronde.check.expected import EXPECTED
from ronde.check.fleet import ENVIRONMENT, Fleet, HostPair, Value, Values
from ronde.check.hosts import HostSet, NodeContext, ProbeStep, Reply
from ronde.check.network.direct_ranks import HalfJob, run_half
from ronde.check.network.interfaces import (
    ADDRESS,
    INTERFACES,
    VIRTUAL,
    HostLink,
    find_link,
    find_name,
)
from ronde.errors import UsageError
from ronde.launch.network import hold_port
from ronde.records import Record
from ronde.store.authentication import SharedKey
from ronde.store.server import serve_network
from ronde.topology.graph import Level
from ronde.topology.nccl_log import judge_nccl_log, read_nccl_log
from ronde.units import list_first

# Fact: by the name of each other host, what comes from it, in GB/s (1e9).
RATES = "network.bandwidth"
# Fact: by the name of each other host with which it could not be measured, why.
FAILURES = "network.bandwidth_failures"
WAY = "network.bandwidth_way"  # fact: what was measured: ``tcp``, ``gloo`` or ``nccl``
# Fact: by rule of ``ronde topo log``, what looks wrong in NCCL's log.
REMARKS = "network.nccl_remarks"
_GPUS = ("gpu.count", "versions.torch_build")
_PORTS = "network.rdma_ports"
_SOCKETS = "sockets-between-nodes"
# Below these shares of the median a host or a link is slow, and crawls.
_SLOW_SHARE, _CRAWL_SHARE = 0.7, 0.3
# Of a faster link so much counts, as the processor or a short test may be the limit.
_MOST_COUNTED_GB_PER_S = 1.25
_UNKNOWN_GB_PER_S = 0.0125  # a link of unknown rate counts as 100 Mbit/s
_STREAM_S, _LISTEN_S, _TIMEOUT_S, _SLACK_S = 0.4, 5.0, 10.0, 5.0
_RANKS_S = 90.0  # for ranks to start, which import torch, to meet and to measure

_HELD = "benching.rendezvous"
_KEY_BYTES = 32
_MAX_CLIENTS = 4096
# Once a rank has failed, the others have so long to report what they saw.
_GRACE_S = 3.0
# By receiver, then by sender: what came through, in gigabytes (1e9) per second.
Rates = Mapping[str, Mapping[str, float]]


class PairRates(NamedTuple):
    """What was measured of a pair of hosts."""

    # In GB/s, what the first and what the second of the pair receives.
    rates: tuple[float, float] = (0.0, 0.0)
    failure: str = ""  # why there is none; empty where there is one
    remarks: Mapping[str, Value] = {}  # what looks wrong in NCCL's log, by rule


class Streams:
    """Plain TCP, both ways at the same time, between ports of ``reach.listen``.

    What NCCL or RDMA reaches it does not show; on fast links copying may be the limit.
    """

    max_rounds = 32

    def __init__(self) -> None:
        self._places: dict[str, dict[str, Value]] = {}

    def open(self, hosts: HostSet) -> dict[str, str]:
        """Have the hosts listen; return those that cannot take part, and why."""
        replies = hosts.ask_all({"do": "listen"}, _LISTEN_S)
        for name, (values, failure, _, _) in replies.items():
            if not failure:
                where = {"address": hosts.addresses[name], "port": values["ports"][0]}
                self._places[name] = {**where, "token": values["token"]}
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
            rates = (r.values.get("gb_per_s", 0.0) for r in (other, one))
            found[pair] = PairRates((*rates,), one.failure or other.failure)
        return found


class Benches:
    """``ronde bench all_reduce`` by ``gloo`` or ``nccl``, all ranks of two hosts."""

    # A round takes as long as torch's import and the engine's start: seconds.
    max_rounds = 8

    def __init__(self, engine: str, num_ranks: int) -> None:
        self._is_nccl = engine == "nccl"
        self._num_ranks = num_ranks
        size, num, num_warm = ("256M", "20", "5") if self._is_nccl else ("8M", "3", "1")
        self._words = [
            *("all_reduce", "-b", size, "-e", size, "-n", num, "-w", num_warm),
            *("--engine", engine, "--device", "cuda" if self._is_nccl else "cpu"),
            *("--no-limit", "-T", f"{_RANKS_S / 2:g}"),
        ]

    def open(self, _: HostSet) -> dict[str, str]:
        """Do nothing: each pair meets at a port of its own."""
        return {}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        """Start a job for each pair, and read what it measured."""
        places = {first: {"address": hosts.addresses[first]} for first, _ in pairs}
        holds = {h: {"do": "hold_rendezvous", **place} for h, place in places.items()}
        held = hosts.ask(holds, _LISTEN_S)
        questions: dict[str, dict[str, Value]] = {}
        for pair in pairs:
            if held[pair[0]].failure:
                continue
            common: dict[str, Value] = {
                "do": "bench",
                "words": self._words,
                "num_ranks": self._num_ranks,
                **places[pair[0]],
                **held[pair[0]].values,
                "token": secrets.token_hex(16),
                "environment": hosts.settings.get(ENVIRONMENT, {}),
                "limit_s": _RANKS_S,
                "has_log": self._is_nccl,
            }
            questions |= {h: {**common, "half": half} for half, h in enumerate(pair)}
        replies = hosts.ask(questions, _RANKS_S + _SLACK_S)
        found = {p: [replies.get(host, held[p[0]]) for host in p] for p in pairs}
        return {pair: self._read(pair, each) for pair, each in found.items()}

    def _read(self, pair: HostPair, replies: Sequence[Reply]) -> PairRates:
        failure = next((reply.failure for reply in replies if reply.failure), "")
        if failure:
            return PairRates(failure=failure)
        answers = [reply.values for reply in replies]
        packed = [base64.b64decode(answer["log"]) for answer in answers]
        logs = [zlib.decompress(each) if each else b"" for each in packed]
        remarks = judge_logs(logs) if self._is_nccl else {}
        try:
            rate = busbw_of(answers[0]["record"])
        except UsageError as error:
            # What ranks have complained of is more than that there is no result.
            ends = zip(pair, answers, strict=True)
            failures = [f"{h}: {a['failure']}" for h, a in ends if a["failure"]]
            failure = "; ".join(failures) or str(error)
            return PairRates(failure=failure, remarks=remarks)
        return PairRates((rate, rate), remarks=remarks)


def busbw_of(record: str) -> float:
    run: Run = from_record(Record.from_json(record))
    if run.num_out_of_bounds:
        raise UsageError(f"{run.num_out_of_bounds} elements of the sums are wrong")
    rates = [
        side.busbw_gb_per_s
        for row in run.rows
        for side in (row.out_of_place, row.in_place)
        if side is not None and side.busbw_gb_per_s is not None
    ]
    if not rates or not run.is_complete:
        raise UsageError("ronde bench measured nothing")
    return max(rates)


def judge_logs(logs: Sequence[bytes]) -> dict[str, Value]:
    """Return by rule what looks wrong in NCCL's logs of the hosts of a pair."""
    log = read_nccl_log(io.BytesIO(text) for text in logs)
    return {
        finding.rule: {
            "is_error": finding.severity is Level.ERROR,
            "what": finding.seen,
            "remedy": finding.remedy,
        }
        for finding in judge_nccl_log(log)
        if finding.severity is not Level.NOTE
    }


def hold_rendezvous(
    context: NodeContext, question: dict[str, Value]
) -> dict[str, Value]:
    """Answer for a store at ``address`` for one job; return ``port`` and ``key``."""
    held, key = hold_port(question["address"]), secrets.token_bytes(_KEY_BYTES)
    port = held.getsockname()[1]
    held.listen()
    server = serve_network(held, SharedKey(key), _MAX_CLIENTS)
    context.memory[_HELD] = server.close
    context.closing.callback(server.close)
    return {"port": port, "key": key.hex()}


def bench(
    context: NodeContext, question: dict[str, Value], grace_s: float = _GRACE_S
) -> dict[str, Value]:
    """Run this host's half of the ranks of a job of two hosts, to their end.

    The question has the fields of ``HalfJob``, the answer those of ``HalfResult``, the
    log packed, and the record that of rank 0 alone.
    """
    given: dict[str, Any] = {name: question[name] for name in HalfJob._fields}
    job = HalfJob(**given)._replace(key=bytes.fromhex(question["key"]))
    held = context.memory.pop(_HELD, None) if job.half == 0 else None
    with ExitStack() as closing:
        if held is not None:
            closing.callback(held)
        record, log, failure = run_half(job, float(question["limit_s"]), grace_s)
    return {
        "record": record.decode(errors="replace") if job.half == 0 else "",
        "log": base64.b64encode(zlib.compress(log)).decode() if log else "",
        "failure": failure,
    }


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


class SlowHost(NamedTuple):
    """A host that is slow with most others; medians over its partners, in GB/s."""

    host: str
    rate: float  # of the lower of both directions
    sent: float
    received: float
    usual: float  # what pairs without a slow host have
    partners: tuple[str, ...]  # with whom it is slow, the slowest first


class SlowLink(NamedTuple):
    """Two hosts that are slow with each other alone."""

    host: str
    other: str
    rate: float  # of the lower direction, in GB/s
    usual: float


def judge_pairs(rates: Rates) -> tuple[tuple[SlowHost, ...], tuple[SlowLink, ...]]:
    """Return who is slow; pairs of which one direction is missing do not count.

    A pair is as fast as the slower of its directions. A host is slow where the median
    over its partners is below a share of the median of all hosts' medians: one slow
    link does not make it that, as long as it has three partners. The links of slow
    hosts are not listed again; each other link is compared with what is usual then.
    """
    pairs = _rates_of_pairs(rates)
    met: dict[str, dict[str, float]] = {}
    for (a, b), rate in pairs.items():
        met.setdefault(a, {})[b] = rate
        met.setdefault(b, {})[a] = rate
    if not met:
        return (), ()
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
    return tuple(described), tuple(links)


def _rates_of_pairs(rates: Rates) -> dict[HostPair, float]:
    """Return the lower direction of each pair that was measured both ways."""
    return {
        (a, b): min(rates[a][b], rates[b][a])
        for a, b in combinations(rates, 2)
        if b in rates[a] and a in rates[b]
    }


class LackingPair(NamedTuple):
    """Two hosts that exchange less than they must, whatever other hosts do."""

    rate: float  # GB/s
    must: str  # what they must reach, or the link that should carry more


def judge_links(fleet: Fleet) -> dict[HostPair, LackingPair]:
    """Return the pairs below the rate of ``--expect``, or far below that of a link."""
    expected = fleet.settings.get(EXPECTED, {}).get("gb_per_s")
    links = {f.host: _link_of(f.values) for f in fleet.having(RATES, WAY)}
    ways = {*fleet.known(WAY).values()}
    lacking: dict[HostPair, LackingPair] = {}
    for pair, rate in _rates_of_pairs(fleet.known(RATES)).items():
        if expected is not None:
            if rate < expected:
                lacking[pair] = LackingPair(rate, f"{_show(expected)} expected")
        # Many ranks of Gloo's wait for each other, whatever the link carries.
        elif ways != {"gloo"} and links.keys() >= {*pair}:
            slower = min((links[host] for host in pair), key=_least_rate)
            known = "" if slower.gb_per_s else "any link carries 0.1 Gbit/s, and "
            if rate < _least_rate(slower):
                lacking[pair] = LackingPair(rate, f"{known}{slower.text}")
    return lacking


def _find_lacking(
    rates: Rates, lacking: Mapping[HostPair, LackingPair]
) -> dict[str, LackingPair]:
    """Return hosts that lack with all others, with the best of that; then pairs."""
    own: dict[str, list[HostPair]] = {}
    for pair in _rates_of_pairs(rates):
        for host in pair:
            own.setdefault(host, []).append(pair)
    found = {
        host: max(lacking[pair] for pair in pairs)
        for host, pairs in own.items()
        if lacking.keys() >= {*pairs}
    }
    alone = [pair for pair in lacking if found.keys().isdisjoint(pair)]
    return found | {name_pair(*pair): lacking[pair] for pair in alone}


def _least_rate(link: HostLink) -> float:
    known = _UNKNOWN_GB_PER_S if link.gb_per_s is None else link.gb_per_s
    return _CRAWL_SHARE * min(known, _MOST_COUNTED_GB_PER_S)


def _link_of(values: Values) -> HostLink:
    """Return what a host measured by: for NCCL its RDMA ports, if there are any."""
    ports: Mapping[str, Any] = values.get(_PORTS, {}) if values[WAY] == "nccl" else {}
    up = [p["mbit_per_s"] / 8000 for p in ports.values() if p["state"] == "ACTIVE"]
    if not up:
        return find_link(values)
    text = f"{len(up)} RDMA ports carry {min(up) * 8:g} Gbit/s each"
    return HostLink(text, min(up))


def run(hosts: HostSet) -> None:
    """Have the hosts meet in pairs, where there are several.

    All pairs of a round are measured at the same time, as a job would load the network.
    Who is slow is measured once more: a busy moment is no slow link.
    """
    if len(hosts.names) < 2:
        return
    engine = _choose_engine(hosts)
    way = Streams() if engine == "tcp" else Benches(engine, _num_ranks(hosts, engine))
    for name, facts in hosts.facts.items():
        facts.values.update({RATES: {}, FAILURES: {}, WAY: engine})
        facts.values[ADDRESS] = hosts.addresses[name]
        facts.values.update({REMARKS: {}} if engine == "nccl" else {})
    left_out = way.open(hosts)
    for name, address in hosts.addresses.items():
        if not address:
            left_out[name] = "no other host has a route to it"
    for name, failure in left_out.items():
        hosts.note_unread(name, RATES, failure)
    schedule = list(rounds([name for name in hosts.names if name not in left_out]))
    # What is left out is spread over the schedule.
    played = schedule[:: max(1, -(-len(schedule) // way.max_rounds))]
    for pairs in played:
        _play(hosts, way, pairs)
    fleet = Fleet(tuple(hosts.facts.values()), hosts.settings)
    slow, links = judge_pairs(fleet.known(RATES))
    suspected = [{each.host, other} for each in slow for other in each.partners]
    suspected += ({each.host, each.other} for each in links)
    suspected += map(set, judge_links(fleet))
    for pairs in played:
        _play(hosts, way, [pair for pair in pairs if {*pair} in suspected])
    for facts in hosts.facts.values():
        if not facts.values[RATES]:
            del facts.values[RATES]
            reasons = [*facts.values[FAILURES].values(), "no other host was met"]
            facts.unreadable.setdefault(RATES, reasons[0])


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
    for pair, (rates, failure, remarks) in way.measure(hosts, pairs).items():
        for one, other, rate in zip(pair, pair[::-1], rates, strict=True):
            known: dict[str, Value] = hosts.facts[one].values
            if remarks:
                known[REMARKS] = {**remarks, **known[REMARKS]}
            if failure:
                known[FAILURES][other] = failure
            else:
                known[RATES][other] = max(rate, known[RATES].get(other, 0.0))


_OWN = (RATES, FAILURES, WAY, REMARKS)
STEP = ProbeStep("bandwidth", run, _OWN, _GPUS, setting="bandwidth")


def _show(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g} GB/s"


def _show_gbit(gb_per_s: float) -> str:
    return f"{_show(gb_per_s)} ({8 * gb_per_s:.3g} Gbit/s)"


@check(FAIL, RATES, WAY, besides=(ADDRESS, INTERFACES, VIRTUAL, _PORTS))
def link_rate(fleet: Fleet) -> Problems:
    """Hosts exchange what their links carry; what was measured is shown.

    reads: what comes through between each two hosts, as for slow-host-link; the rate of
        the interface or RDMA ports between them, which is unknown for virtual ones
    threshold: the rate of --expect, as 10GB/s; else 30 % of the link's rate, of which
        10 Gbit/s count at most; an unknown rate counts as 100 Mbit/s. Gloo: --expect
    source: ronde's own: four streams fill a sound link of up to 10 Gbit/s by more than
        half while others use it too; beyond, one processor may be the limit
    fix: ethtool, ip -s link and tc qdisc show the link's rate, errors and limits; then
        look at cables and switches. A link that is meant to be slow: --expect RATE.
    needs: several hosts, and --bandwidth
    why: Where all hosts are slow none differs, and every step waits for the network.
    """
    rates = fleet.known(RATES)
    slow, links = judge_pairs(rates)
    crawling = {each.host for each in slow if _crawls(each)}
    crawling |= {name_pair(each.host, each.other) for each in links if _crawls(each)}
    lacking = _find_lacking(rates, judge_links(fleet))
    # The same for all, so that they share a finding's lines.
    meant = f"{round(500 * min((e.rate for e in lacking.values()), default=0), 2):g}"
    for where, (rate, must) in lacking.items():
        if where not in crawling:
            what, first = f"only {_show_gbit(rate)}", where.partition(" ")[0]
            fix = _look_at_link(fleet, first)
            fix += f"; or, if it is meant to be so slow: --expect {meant}MB/s"
            yield Problem(what, usual=must, fix=fix, host=where)
    pairs = _rates_of_pairs(rates).values()
    least, most = min(pairs, default=0.0), max(pairs, default=0.0)
    shown = _show_gbit(most)
    if _show(least) != _show(most):
        shown = f"{_show(least)} to {shown}"
    for facts in fleet.having(RATES, WAY) if pairs else ():
        if facts.host not in lacking:
            what = f"{shown} between hosts by {facts.values[WAY]}"
            text = f"{what}; {_link_of(facts.values).text}"
            yield Problem(text, INFORM, host=facts.host)


def _look_at_link(fleet: Fleet, host: str) -> str:
    name = next((find_name(f.values) for f in fleet.hosts if f.host == host), "")
    link = name or "INTERFACE"
    return (
        f"ethtool {link}; ip -s link show {link}; tc qdisc show dev {link}  # there; "
        "then look at cable and switch, and at what a cloud grants such a machine"
    )


def _crawls(found: SlowHost | SlowLink) -> bool:
    return found.rate < _CRAWL_SHARE * found.usual


@check(FAIL, RATES, besides=(ADDRESS, INTERFACES))
def slow_host_link(fleet: Fleet) -> Problems:
    """A host exchanges as much with the others as they do.

    reads: what comes through between each two hosts: TCP both ways, or ronde bench
    threshold: 70 % of the median of all hosts; below 30 % it fails; three or more hosts
    source: ronde's own: a link at half its rate lies below 70 %, one short measurement
        of a sound link above; below 30 % it is slower than at half its rate
    fix: ethtool, ip -s link and tc qdisc show its link's rate, errors and limits; then
        look at its cable, its port of the switch, and what the cloud grants it.
    needs: several hosts, and --bandwidth
    why: Gradients go through all hosts: the slowest sets the pace of every step.
    """
    for slow in judge_pairs(fleet.known(RATES))[0]:
        limit = _SLOW_SHARE * slow.usual
        if slow.sent < limit <= slow.received:
            what = f"it sends only {_show(slow.sent)} to"
        elif slow.received < limit <= slow.sent:
            what = f"it receives only {_show(slow.received)} from"
        else:
            what = f"only {_show(slow.rate)} with"
        yield Problem(
            f"{what} {list_first([*slow.partners], 4)}",
            FAIL if _crawls(slow) else WARN,
            f"{_show(slow.usual)} between other hosts",
            _look_at_link(fleet, slow.host),
            slow.host,
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
    for link in judge_pairs(fleet.known(RATES))[1]:
        fix = (
            f"ronde run -H {link.host},{link.other} ronde bench sendrecv -b 64M -e 64M"
            "  # shows what an engine reaches; look at cables and switches between them"
        )
        yield Problem(
            f"only {_show(link.rate)} go through",
            FAIL if _crawls(link) else WARN,
            f"{_show(link.usual)} between other hosts",
            fix,
            name_pair(link.host, link.other),
        )


@check(FAIL, FAILURES, WAY)
def pair_job(fleet: Fleet) -> Problems:
    """Any two hosts can run a collective together.

    reads: ronde bench all_reduce on two hosts: a rank a GPU with NCCL, a slot with Gloo
    threshold: each job ends with right sums; a host that always fails is named alone
    source: NVIDIA's nccl-tests a0b82b2 (src/common.cu): a run with a wrong element has
        failed
    fix: ronde run -H ONE,OTHER -x NCCL_DEBUG=INFO ronde bench all_reduce shows more.
    needs: several hosts, torch, and --bandwidth gloo or nccl
    why: A job that includes both hosts fails in the same way.
    """
    known = [f for f in fleet.having(FAILURES, WAY) if f.values[WAY] != "tcp"]
    failures: dict[str, Mapping[str, str]] = {f.host: f.values[FAILURES] for f in known}
    able = {facts.host for facts in known if facts.values.get(RATES)}

    def failed(where: str, names: str, among: str, reason: str) -> Problem:
        way = known[0].values[WAY]
        what = f"no all_reduce by {way} {among}: {reason.rstrip('.')}"
        fix = f"ronde run -H {names} -x NCCL_DEBUG=INFO ronde bench all_reduce "
        return Problem(what, fix=f"{fix}--engine {way}  # shows more", host=where)

    for host, reasons in failures.items():
        if reasons and host not in able:
            reason = next(iter(reasons.values()))
            names = f"{host},{next(iter(reasons))}"
            yield failed(host, names, f"with {list_first([*reasons], 4)}", reason)
    order = list(failures)
    for host, reasons in failures.items():
        for other, reason in reasons.items():
            if {host, other} <= able and order.index(host) < order.index(other):
                where, names = name_pair(host, other), f"{host},{other}"
                yield failed(where, names, "between the two", reason)


@each_host(FAIL, REMARKS, besides=(_PORTS,))
def nccl_choice(values: Values, _: Fleet) -> Problems:
    """NCCL chose the fast way between hosts and between GPUs.

    reads: NCCL's log of these jobs, as ronde topo log reads it
    threshold: no error of ronde topo log, no sockets if RDMA is up; its warnings warn
    source: NCCL 2.30.7's manual, Logging; docs/topology-log.md has the rules
    fix: See docs/topology-log.md for the rule that is named.
    needs: several hosts with GPUs, and --bandwidth
    why: By sockets or host memory a fraction of the bandwidth is left, unnoticed.
    """
    # The kernel has an RDMA port that is up, whatever NCCL found.
    ports = values.get(_PORTS, {}).values()
    is_up = any(port["state"] == "ACTIVE" for port in ports)
    for rule, remark in values[REMARKS].items():
        is_bad = remark["is_error"] or (rule == _SOCKETS and is_up)
        what = f"{rule}: {remark['what'].rstrip('.')}"
        yield Problem(what, FAIL if is_bad else WARN, fix=remark["remedy"])
