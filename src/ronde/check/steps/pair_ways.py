"""The ways to measure what goes through between two hosts: streams, or small jobs."""

import io
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ronde.bench.bench_record import from_record
from ronde.bench.runs import Run
from ronde.check.facts import ENVIRONMENT, Value
from ronde.check.hosts import HostSet, Reply
from ronde.check.operations.bandwidth import MEET_S, WARM_S
from ronde.check.operations.benching import unpack_log
from ronde.errors import UsageError
from ronde.records import Record
from ronde.topology.findings import Level
from ronde.topology.nccl_log import judge_nccl_log, read_nccl_log

Pair = tuple[str, str]

STREAM_S = 0.3
"""How long a pair's streams are measured."""

_OFFER_S = 5.0
_SLACK_S = 5.0
_RANKS_S = 90.0
"""For ranks to start, which import torch, to meet and to measure."""


class Measured(NamedTuple):
    """What came of a pair.

    Attributes:
        rates: In GB/s, what the first and what the second of the pair receives.
        failure: Why there is none; empty where there is one.
        remarks: What NCCL's log says that looks wrong, by rule.
    """

    rates: tuple[float, float] = (0.0, 0.0)
    failure: str = ""
    remarks: Mapping[str, Value] = {}


class Way(Protocol):
    """How pairs are measured.

    Attributes:
        max_rounds: More are not played: of many hosts, each meets only so many others.
    """

    max_rounds: int

    def open(self, panel: HostSet) -> Mapping[str, str]:
        """Make hosts ready; return those that cannot take part, and why."""
        ...

    def measure(self, panel: HostSet, pairs: Sequence[Pair]) -> dict[Pair, Measured]:
        """Measure disjoint pairs at the same time."""
        ...


class Streams:
    """Plain TCP, both ways at the same time; needs nothing but Python."""

    max_rounds = 32

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}

    def open(self, panel: HostSet) -> Mapping[str, str]:
        """Have the hosts listen for streams."""
        questions: dict[str, dict[str, Value]] = {
            name: {"do": "offer_streams", "address": address}
            for name, address in panel.addresses.items()
            if address
        }
        failures: dict[str, str] = {}
        for name, reply in panel.ask(questions, _OFFER_S).items():
            if reply.failure:
                failures[name] = reply.failure
            else:
                self._ports[name] = reply.values["port"]
        return failures

    def measure(self, panel: HostSet, pairs: Sequence[Pair]) -> dict[Pair, Measured]:
        """Have each pair send to each other for a fixed time."""
        questions: dict[str, dict[str, Value]] = {}
        for caller, called in pairs:
            token = secrets.token_hex(16)
            common = {"do": "stream", "token": token, "seconds": STREAM_S}
            place = {"address": panel.addresses[called], "port": self._ports[called]}
            questions |= {caller: common | place, called: common}
        replies = panel.ask(questions, 2 * (MEET_S + WARM_S + STREAM_S) + _SLACK_S)
        return {pair: _stream_rates([replies[host] for host in pair]) for pair in pairs}


def _stream_rates(replies: Sequence[Reply]) -> Measured:
    failure = next((reply.failure for reply in replies if reply.failure), "")
    if failure:
        return Measured(failure=failure)
    first, second = (reply.values["gb_per_s"] for reply in replies)
    return Measured((first, second))


class Benches:
    """``ronde bench all_reduce`` among all ranks of two hosts.

    Args:
        engine: ``gloo`` or ``nccl``.
        num_ranks: On each host.
    """

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

    def open(self, panel: HostSet) -> Mapping[str, str]:
        """Do nothing: each pair meets at a port of its own."""
        del panel
        return {}

    def measure(self, panel: HostSet, pairs: Sequence[Pair]) -> dict[Pair, Measured]:
        """Start a job for each pair, and read what it measured."""
        holds: dict[str, dict[str, Value]] = {
            first: {"do": "hold_rendezvous", "address": panel.addresses[first]}
            for first, _ in pairs
        }
        held = panel.ask(holds, _OFFER_S)
        questions: dict[str, dict[str, Value]] = {}
        for pair in pairs:
            reply = held[pair[0]]
            if not reply.failure:
                questions |= self._questions(panel, pair, reply.values)
        replies = panel.ask(questions, _RANKS_S + _SLACK_S) if questions else {}
        return {
            pair: self._read(pair, [replies.get(h, held[pair[0]]) for h in pair])
            for pair in pairs
        }

    def _questions(
        self, panel: HostSet, pair: Pair, held: Mapping[str, Value]
    ) -> dict[str, dict[str, Value]]:
        common: dict[str, Value] = {
            "do": "bench",
            "words": self._words,
            "num_ranks": self._num_ranks,
            "address": panel.addresses[pair[0]],
            "port": held["port"],
            "key": held["key"],
            "token": secrets.token_hex(16),
            "environment": panel.settings.get(ENVIRONMENT, {}),
            "limit_s": _RANKS_S,
            "has_log": self._is_nccl,
        }
        return {host: common | {"half": half} for half, host in enumerate(pair)}

    def _read(self, pair: Pair, replies: Sequence[Reply]) -> Measured:
        failure = next((reply.failure for reply in replies if reply.failure), "")
        if failure:
            return Measured(failure=failure)
        answers = [reply.values for reply in replies]
        logs = [unpack_log(answer["log"]) for answer in answers]
        remarks = judge_logs(logs) if self._is_nccl else {}
        try:
            rate = busbw_of(answers[0]["record"])
        except UsageError as error:
            # What ranks have complained of says more than that there is no result.
            complaints = [
                f"{host} says: {answer['failure']}"
                for host, answer in zip(pair, answers, strict=True)
                if answer["failure"]
            ]
            return Measured(
                failure="; ".join(complaints) or str(error), remarks=remarks
            )
        return Measured((rate, rate), remarks=remarks)


def busbw_of(record: str) -> float:
    """Return the bus bandwidth in GB/s of the one row that a record has.

    Raises:
        UsageError: It is no record of a run that ended well.
    """
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
    """Return by rule what looks wrong in what NCCL said on the hosts of a pair."""
    log = read_nccl_log(io.BytesIO(text) for text in logs)
    return {
        finding.rule: {
            "is_error": finding.severity is Level.ERROR,
            "what": finding.what,
            "remedy": finding.remedy,
        }
        for finding in judge_nccl_log(log)
        if finding.severity is not Level.NOTE
    }
