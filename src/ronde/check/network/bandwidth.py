"""Measure the bandwidth between pairs of hosts, and find slow hosts and links.

Pairs are measured in rounds, as in a round-robin tournament. A round consists of
disjoint pairs, which are measured at the same time: by TCP streams, or by a job on both
hosts of each pair.
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
from ronde.topology.nccl_log import lint_nccl_log, read_nccl_log
from ronde.units import list_first

RATES = "network.bandwidth"  # fact: GB/s (1e9) from each other host
FAILURES = "network.bandwidth_failures"  # fact: the reason, by other host
WAY = "network.bandwidth_way"  # fact: ``tcp``, ``gloo`` or ``nccl``
# Fact: findings in NCCL's log, keyed by rule of ``ronde topo log``.
REMARKS = "network.nccl_remarks"
_GPUS = ("gpu.count", "versions.torch_build")
_PORTS = "network.rdma_ports"
_SOCKETS = "sockets-between-nodes"
# Below these shares of the median a host or a link is slow, or very slow.
_SLOW_SHARE, _VERY_SLOW_SHARE = 0.7, 0.3
# On faster links, the CPU or the short duration may be the limit.
_MOST_COUNTED_GB_PER_S = 1.25
_UNKNOWN_GB_PER_S = 0.0125  # a link of unknown rate counts as 100 Mbit/s
_STREAM_S, _LISTEN_S, _TIMEOUT_S, _SLACK_S = 0.4, 5.0, 10.0, 5.0
_RANKS_S = 90.0  # for ranks to import torch, connect and measure

_HELD = "benching.rendezvous"
_KEY_BYTES = 32
_MAX_CLIENTS = 4096
_GRACE_S = 3.0  # after the failure of a rank, for the others to report theirs
# GB/s (1e9), keyed by receiver, then by sender.
Rates = Mapping[str, Mapping[str, float]]


class PairRates(NamedTuple):
    """The bandwidth between two hosts, or the reason for its absence."""

    rates: tuple[float, float] = (0.0, 0.0)  # GB/s that each of the two receives
    failure: str = ""  # the reason if there are no rates
    remarks: Mapping[str, Value] = {}  # see ``REMARKS``


class Streams:
    """Measure pairs with TCP streams in both directions at once.

    The streams connect to ports of ``reach.listen``. NCCL and RDMA may be faster, since
    the CPU may limit TCP on fast links.
    """

    max_rounds = 32

    def __init__(self) -> None:
        self._listeners: dict[str, dict[str, Value]] = {}

    def open(self, hosts: HostSet) -> dict[str, str]:
        replies = hosts.ask_all({"do": "listen"}, _LISTEN_S)
        for name, (values, failure, _, _) in replies.items():
            if not failure:
                self._listeners[name] = {
                    "address": hosts.addresses[name],
                    "port": values["ports"][0],
                    "token": values["token"],
                }
        return {n: reply.failure for n, reply in replies.items() if reply.failure}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        """Make the two hosts of each pair send to each other for a fixed time."""
        common = {"do": "stream", "seconds": _STREAM_S}
        ways = [way for pair in pairs for way in (pair, pair[::-1])]
        questions = {one: {**common, **self._listeners[other]} for one, other in ways}
        replies = hosts.ask(questions, _TIMEOUT_S)
        found: dict[HostPair, PairRates] = {}
        for pair in pairs:
            one, other = (replies[host] for host in pair)
            rates = (r.values.get("gb_per_s", 0.0) for r in (other, one))
            found[pair] = PairRates((*rates,), one.failure or other.failure)
        return found


class Benches:
    """Measure pairs with ``ronde bench all_reduce``, over ``gloo`` or ``nccl``."""

    max_rounds = 8  # each takes seconds: torch's import and the engine's start

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
        """Return no failures, since nothing is opened before ``measure``."""
        return {}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        addresses = {first: hosts.addresses[first] for first, _ in pairs}
        holds = {
            h: {"do": "hold_rendezvous", "address": a} for h, a in addresses.items()
        }
        held = hosts.ask(holds, _LISTEN_S)
        questions: dict[str, dict[str, Value]] = {}
        for pair in pairs:
            if held[pair[0]].failure:
                continue
            common: dict[str, Value] = {
                "do": "bench",
                "words": self._words,
                "num_ranks": self._num_ranks,
                "address": addresses[pair[0]],
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
            # Errors of ranks explain more than a missing result.
            ends = zip(pair, answers, strict=True)
            failures = [f"{h}: {a['failure']}" for h, a in ends if a["failure"]]
            failure = "; ".join(failures) or str(error)
            return PairRates(failure=failure, remarks=remarks)
        return PairRates((rate, rate), remarks=remarks)


def busbw_of(record: str) -> float:
    run: Run = from_record(Record.from_json(record))
    if run.num_out_of_bounds:
        raise UsageError(f"{run.num_out_of_bounds} elements of the result are wrong")
    rates = [
        side.busbw_gb_per_s
        for row in run.rows
        for side in (row.out_of_place, row.in_place)
        if side is not None and side.busbw_gb_per_s is not None
    ]
    if not rates or not run.is_complete:
        raise UsageError("ronde bench ended without a result")
    return max(rates)


def judge_logs(logs: Sequence[bytes]) -> dict[str, Value]:
    """Return the findings on the NCCL logs of two hosts, by rule and without notes."""
    log = read_nccl_log(io.BytesIO(text) for text in logs)
    return {
        finding.rule: {
            "is_error": finding.severity is Level.ERROR,
            "message": finding.seen,
            "remedy": finding.remedy,
        }
        for finding in lint_nccl_log(log)
        if finding.severity is not Level.NOTE
    }


def hold_rendezvous(
    context: NodeContext, question: dict[str, Value]
) -> dict[str, Value]:
    """Serve a store for one job, and return its ``port`` and ``key``."""
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
    """Run this host's ranks of a two-host job, and wait until they end.

    The question has the fields of ``HalfJob`` and ``limit_s``. The answer has the
    ``record`` of rank 0, the compressed NCCL ``log``, and ``failure``.
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
    """Yield rounds of disjoint pairs that together cover all pairs (circle method)."""
    circle: list[str | None] = [*hosts]
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield tuple((a, b) for a, b in facing if a is not None and b is not None)
        circle.insert(1, circle.pop())


class SlowHost(NamedTuple):
    """A host with slow connections to most other hosts.

    The rates are medians over the other hosts, in GB/s (1e9 bytes).
    """

    host: str
    rate: float  # of the slower direction
    sent: float
    received: float
    usual: float  # the rate of pairs without a slow host
    partners: tuple[str, ...]  # slow pairs, the slowest first


class SlowLink(NamedTuple):
    """Two hosts that are not slow, but have a slow connection with each other."""

    host: str
    other: str
    rate: float  # of the slower direction, in GB/s
    usual: float


def judge_pairs(rates: Rates) -> tuple[tuple[SlowHost, ...], tuple[SlowLink, ...]]:
    """Return the slow hosts, and the slow links between the other hosts.

    Only pairs measured in both directions count, with the rate of the slower direction.
    A host is slow if the median rate of its pairs is below a share of the median of all
    hosts' medians. So one slow link among three does not make a host slow. Links of
    slow hosts are not reported again. The remaining links are compared with their own
    median.
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
    # Slow hosts lower the medians of the others, so leave them out.
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
    """Return the slower rate of each pair that was measured in both directions."""
    return {
        (a, b): min(rates[a][b], rates[b][a])
        for a, b in combinations(rates, 2)
        if b in rates[a] and a in rates[b]
    }


class LackingPair(NamedTuple):
    """A pair with less bandwidth than ``--expect``, or much less than its link."""

    rate: float  # GB/s
    required: str  # the expected rate, or the link


def judge_links(fleet: Fleet) -> dict[HostPair, LackingPair]:
    """Return the pairs below ``--expect``, or far below the rate of their link."""
    expected = fleet.settings.get(EXPECTED, {}).get("gb_per_s")
    links = {f.host: _link_of(f.values) for f in fleet.having(RATES, WAY)}
    ways = {*fleet.known(WAY).values()}
    lacking: dict[HostPair, LackingPair] = {}
    for pair, rate in _rates_of_pairs(fleet.known(RATES)).items():
        if expected is not None:
            if rate < expected:
                lacking[pair] = LackingPair(rate, f"{_show(expected)} expected")
        # Gloo's many ranks wait for each other, so the link is not the limit.
        elif ways != {"gloo"} and links.keys() >= {*pair}:
            slower = min((links[host] for host in pair), key=_least_rate)
            known = "" if slower.gb_per_s else "any link carries 0.1 Gbit/s, and "
            if rate < _least_rate(slower):
                lacking[pair] = LackingPair(rate, f"{known}{slower.text}")
    return lacking


def _find_lacking(
    rates: Rates, lacking: Mapping[HostPair, LackingPair]
) -> dict[str, LackingPair]:
    """Return the hosts that lack bandwidth in all their pairs, and other such pairs.

    The value of a host is its best pair. The key of a pair is its ``name_pair``.
    """
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
    return _VERY_SLOW_SHARE * min(known, _MOST_COUNTED_GB_PER_S)


def _link_of(values: Values) -> HostLink:
    """Return the measured link; for NCCL these are the RDMA ports, if any are up."""
    ports: Mapping[str, Any] = values.get(_PORTS, {}) if values[WAY] == "nccl" else {}
    up = [p["mbit_per_s"] / 8000 for p in ports.values() if p["state"] == "ACTIVE"]
    if not up:
        return find_link(values)
    text = f"{len(up)} RDMA ports carry {min(up) * 8:g} Gbit/s each"
    return HostLink(text, min(up))


def run(hosts: HostSet) -> None:
    """Measure the pairs of hosts in rounds, and the slow pairs twice.

    All pairs of a round are measured at the same time, to load the network like a job.
    The better result of a slow pair counts, as the network may have been busy.
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
    # Spread the omitted rounds over the schedule.
    chosen = schedule[:: max(1, -(-len(schedule) // way.max_rounds))]
    for pairs in chosen:
        _measure(hosts, way, pairs)
    fleet = Fleet(tuple(hosts.facts.values()), hosts.settings)
    slow, links = judge_pairs(fleet.known(RATES))
    again = [{each.host, other} for each in slow for other in each.partners]
    again += ({each.host, each.other} for each in links)
    again += map(set, judge_links(fleet))
    for pairs in chosen:
        _measure(hosts, way, [pair for pair in pairs if {*pair} in again])
    for facts in hosts.facts.values():
        if not facts.values[RATES]:
            del facts.values[RATES]
            reasons = [*facts.values[FAILURES].values(), "it was in no measured pair"]
            facts.unreadable.setdefault(RATES, reasons[0])


def _choose_engine(hosts: HostSet) -> str:
    """Return the user's choice; ``auto`` is NCCL if all hosts can use it, else TCP."""
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
    """Return the number of ranks per host, with NCCL at most one per GPU."""
    wanted = int(hosts.settings.get("num_ranks") or 0)
    if engine == "gloo":
        return wanted or 1
    fewest = min(int(f.values.get(_GPUS[0]) or 0) for f in hosts.facts.values())
    return max(1, min(wanted or fewest, fewest))


def _measure(hosts: HostSet, way: Streams | Benches, pairs: Sequence[HostPair]) -> None:
    """Measure disjoint pairs, and keep the better of the new and earlier results."""
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


@check(FAIL, RATES, WAY, optional=(ADDRESS, INTERFACES, VIRTUAL, _PORTS))
def link_rate(fleet: Fleet) -> Problems:
    """The bandwidth between hosts matches the rate of their links.

    reads: the bandwidth between pairs of hosts, measured as for slow-host-link and
        always shown; the rate of the interfaces or RDMA ports between them, which is
        unknown for virtual ones
    threshold: the rate of --expect, such as 10GB/s; else 30 % of the link's rate. Rates
        above 10 Gbit/s are taken as 10 Gbit/s, unknown ones as 100 Mbit/s. Gloo is
        compared with --expect only
    source: ronde's choice: four streams use more than half of a healthy link of up to
        10 Gbit/s, even if it is shared; on faster links, one CPU may be the limit
    fix: ethtool, ip -s link and tc qdisc show the link's rate, errors and limits; then
        look at cables and switches. If the link is meant to be slow: --expect RATE.
    needs: several hosts, and --bandwidth
    why: If all hosts are slow, comparisons find nothing, and every step is slow.
    """
    rates = fleet.known(RATES)
    slow, links = judge_pairs(rates)
    crawling = {each.host for each in slow if _is_very_slow(each)}
    crawling |= {
        name_pair(each.host, each.other) for each in links if _is_very_slow(each)
    }
    lacking = _find_lacking(rates, judge_links(fleet))
    # The same rate for all, so that equal fixes are shown once.
    meant = f"{round(500 * min((e.rate for e in lacking.values()), default=0), 2):g}"
    for where, (rate, required) in lacking.items():
        if where not in crawling:
            message, first = f"only {_show_gbit(rate)}", where.partition(" ")[0]
            fix = _look_at_link(fleet, first)
            fix += f"; or, if it is meant to be so slow: --expect {meant}MB/s"
            yield Problem(message, usual=required, fix=fix, host=where)
    pairs = _rates_of_pairs(rates).values()
    least, most = min(pairs, default=0.0), max(pairs, default=0.0)
    shown = _show_gbit(most)
    if _show(least) != _show(most):
        shown = f"{_show(least)} to {shown}"
    for facts in fleet.having(RATES, WAY) if pairs else ():
        if facts.host not in lacking:
            message = f"{shown} between hosts by {facts.values[WAY]}"
            text = f"{message}; {_link_of(facts.values).text}"
            yield Problem(text, INFORM, host=facts.host)


def _look_at_link(fleet: Fleet, host: str) -> str:
    name = next((find_name(f.values) for f in fleet.hosts if f.host == host), "")
    link = name or "INTERFACE"
    return (
        f"ethtool {link}; ip -s link show {link}; tc qdisc show dev {link}  # there; "
        "then look at cable and switch, and at the cloud's limit for such a machine"
    )


def _is_very_slow(found: SlowHost | SlowLink) -> bool:
    return found.rate < _VERY_SLOW_SHARE * found.usual


@check(FAIL, RATES, optional=(ADDRESS, INTERFACES))
def slow_host_link(fleet: Fleet) -> Problems:
    """Each host has as much bandwidth as the others.

    reads: the bandwidth between pairs of hosts, by TCP or by ronde bench
    threshold: 70 % of the median of all hosts; below 30 % is a failure. At least 3
        hosts
    source: ronde's choice: a link at half its rate is below 70 %, and a short
        measurement of a healthy link above; below 30 %, more than half of the rate is
        lost
    fix: ethtool, ip -s link and tc qdisc show the link's rate, errors and limits; then
        look at the cable, the switch port, and the cloud's limit.
    needs: several hosts, and --bandwidth
    why: Gradients go through all hosts, so the slowest one sets the pace of every step.
    """
    for slow in judge_pairs(fleet.known(RATES))[0]:
        limit = _SLOW_SHARE * slow.usual
        if slow.sent < limit <= slow.received:
            message = f"it sends only {_show(slow.sent)} to"
        elif slow.received < limit <= slow.sent:
            message = f"it receives only {_show(slow.received)} from"
        else:
            message = f"only {_show(slow.rate)} with"
        yield Problem(
            f"{message} {list_first([*slow.partners], 4)}",
            FAIL if _is_very_slow(slow) else WARN,
            f"{_show(slow.usual)} between other hosts",
            _look_at_link(fleet, slow.host),
            slow.host,
        )


@check(FAIL, RATES)
def slow_pair(fleet: Fleet) -> Problems:
    """No two hosts have much less bandwidth between them than other pairs.

    reads: the bandwidth between pairs of hosts, as for slow-host-link
    threshold: 70 % of the median of the pairs without a slow host; below 30 % is a
        failure
    source: as for slow-host-link
    fix: Look at the path between the two: traceroute, and the switches on it. ronde run
        -H ONE,OTHER ronde bench sendrecv -b 64M -e 64M measures it with a collective
        engine.
    needs: several hosts, and --bandwidth
    why: A ring in which the two hosts are neighbours is as slow as their link.
    """
    for link in judge_pairs(fleet.known(RATES))[1]:
        fix = (
            f"ronde run -H {link.host},{link.other} ronde bench sendrecv -b 64M -e 64M"
            "  # measures it with an engine; look at cables and switches between them"
        )
        yield Problem(
            f"only {_show(link.rate)} between them",
            FAIL if _is_very_slow(link) else WARN,
            f"{_show(link.usual)} between other hosts",
            fix,
            name_pair(link.host, link.other),
        )


@check(FAIL, FAILURES, WAY)
def pair_job(fleet: Fleet) -> Problems:
    """Any two hosts can run a collective together.

    reads: ronde bench all_reduce on two hosts, a rank per GPU (NCCL) or per slot (Gloo)
    threshold: each job ends with correct sums. Otherwise the pair is reported, or a
        host that fails with all others
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
        message = f"no all_reduce by {way} {among}: {reason.rstrip('.')}"
        fix = f"ronde run -H {names} -x NCCL_DEBUG=INFO ronde bench all_reduce "
        return Problem(message, fix=f"{fix}--engine {way}  # shows more", host=where)

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


@each_host(FAIL, REMARKS, optional=(_PORTS,))
def nccl_choice(values: Values, _: Fleet) -> Problems:
    """NCCL uses the fast path between hosts and between GPUs.

    reads: NCCL's log of the jobs of pair-job, read as by ronde topo log
    threshold: no error or warning of ronde topo log, and no sockets if an RDMA port is
        up
    source: NCCL 2.30.7's manual, Logging; docs/topology-log.md has the rules
    fix: Look the rule up in docs/topology-log.md.
    needs: several hosts with GPUs, and --bandwidth
    why: Sockets and host memory have only a fraction of the bandwidth.
    """
    # The kernel shows an RDMA port that is up, even if NCCL found none.
    ports = values.get(_PORTS, {}).values()
    is_up = any(port["state"] == "ACTIVE" for port in ports)
    for rule, remark in values[REMARKS].items():
        is_bad = remark["is_error"] or (rule == _SOCKETS and is_up)
        message = f"{rule}: {remark['message'].rstrip('.')}"
        yield Problem(message, FAIL if is_bad else WARN, fix=remark["remedy"])
