"""Small jobs of two hosts: ``ronde bench`` among all their ranks, and NCCL's log of it.

The ranks are started as ``ronde run`` starts them, with the same environment, but by
the program that is on the host already. Nothing is written to a disk: their output goes
into memory, through descriptors that they inherit.
"""

import base64
import io
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from ronde.bench.results import Run, from_record
from ronde.check.check import (
    ENVIRONMENT,
    FAIL,
    WARN,
    Fleet,
    HostPair,
    Problem,
    Problems,
    Value,
    Values,
    check,
    each_host,
    name_pair,
    name_some,
)
from ronde.check.hosts import HostSet, NodeContext, Reply
from ronde.errors import UsageError
from ronde.launch.environments import (
    JobFacts,
    NodeFacts,
    base_environment,
    default_environment,
    own_environment,
    rank_environment,
)
from ronde.launch.network import hold_port
from ronde.records import Record
from ronde.store.authentication import SharedKey
from ronde.store.server import serve_network
from ronde.topology.graph import Level
from ronde.topology.nccl_log import judge_nccl_log, read_nccl_log
from ronde.world import World

# Fact: by the name of each other host, what comes from it, in GB/s (1e9).
RATES = "network.bandwidth"
# Fact: by the name of each other host with which it could not be measured, why.
FAILURES = "network.bandwidth_failures"
# Fact: what was measured: ``tcp``, ``gloo`` or ``nccl``.
WAY = "network.bandwidth_way"
# Fact: by rule of ``ronde topo log``, what looks wrong in NCCL's log.
REMARKS = "network.nccl_remarks"
_OFFER_S, _SLACK_S = 5.0, 5.0
# For ranks to start, which import torch, to meet and to measure.
_RANKS_S = 90.0
_PORTS = "network.rdma_ports"
_SOCKETS = "sockets-between-nodes"

_HELD = "benching.rendezvous"
_KEY_BYTES = 32
_MAX_CLIENTS = 4096
_POLL_S = 0.02
# Once a rank has failed, the others have so long to report what they saw.
_GRACE_S = 3.0
_MAX_LOG_BYTES = 4 << 20
_MAX_REASON_CHARS = 300
_PACKAGE_DIR = __file__.rpartition("/ronde/check/")[0]
_BOOT = """\
import os, signal, sys
package, parent = sys.argv.pop(1), int(sys.argv.pop(1))
sys.path.append(package)
from ronde.launch.process_tree import die_with_parent
if not die_with_parent(parent, signal.SIGKILL):
    os._exit(1)
from ronde.cli import main
sys.exit(main())
"""


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


def bench(context: NodeContext, question: dict[str, Value]) -> dict[str, Value]:
    """Run this host's half of the ranks of a job of two hosts, to their end.

    The question has ``words``: what stands after ``ronde bench``; ``half``: 0 on the
    host of rank 0, else 1; ``num_ranks``: on each host; ``address``, ``port`` and
    ``key``: of their store; ``token``: the job's name; ``environment``: what the user's
    jobs take along; ``limit_s``; ``has_log``: whether NCCL is to log what it does.

    The answer has ``record``: what rank 0 has written with ``--json``; ``log``: NCCL's,
    packed; ``failure``: why it did not go well, or empty.
    """
    half = int(question["half"])
    held = context.memory.pop(_HELD, None) if half == 0 else None
    with ExitStack() as closing:
        if held is not None:
            closing.callback(held)
        ranks = [
            _start(question, place, closing)
            for place in range(int(question["num_ranks"]))
        ]
        failure = _follow(ranks, float(question["limit_s"]))
        logs = b"".join(_read(rank.log_fd) for rank in ranks)
        record = _read(ranks[0].record_fd).decode(errors="replace")
    return {
        "record": record if half == 0 else "",
        "log": base64.b64encode(zlib.compress(logs)).decode() if logs else "",
        "failure": failure,
    }


class _Rank(NamedTuple):
    process: "subprocess.Popen[bytes]"
    output_fd: int
    record_fd: int
    log_fd: int


def _start(question: Mapping[str, Value], local_rank: int, closing: ExitStack) -> _Rank:
    """Start one rank; when ``closing`` ends it has ended and nothing is left of it."""
    fds = [os.memfd_create("ronde") for _ in range(4)]
    output_fd, record_fd, log_fd, key_fd = fds
    os.write(key_fd, bytes.fromhex(question["key"]))
    for fd in fds:
        closing.callback(os.close, fd)
    env = _environment(question, local_rank)
    if question["has_log"]:
        env["NCCL_DEBUG"] = "INFO"
        env["NCCL_DEBUG_SUBSYS"] = "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"
        env["NCCL_DEBUG_FILE"] = f"/dev/fd/{log_fd}"
    env["RONDE_STORE"] = f"{question['address']}:{question['port']} /dev/fd/{key_fd}"
    boot = [sys.executable, "-c", _BOOT, _PACKAGE_DIR, str(os.getpid())]
    process = subprocess.Popen(
        [*boot, "bench", *question["words"], "--json", f"/dev/fd/{record_fd}"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output_fd,
        stderr=output_fd,
        start_new_session=True,
        pass_fds=(record_fd, log_fd, key_fd),
    )
    closing.callback(_end, process)
    return _Rank(process, output_fd, record_fd, log_fd)


def _environment(question: Mapping[str, Value], local_rank: int) -> dict[str, str]:
    half, num_ranks = int(question["half"]), int(question["num_ranks"])
    world = World(
        rank=half * num_ranks + local_rank,
        size=2 * num_ranks,
        local_rank=local_rank,
        local_size=num_ranks,
        cross_rank=half,
        cross_size=2,
    )
    job = JobFacts(f"check-{question['token']}", 0, question["token"])
    node = NodeFacts(os.uname().nodename, half, 2)
    return (
        base_environment(own_environment())
        | default_environment(1)
        | question["environment"]
        | rank_environment(world, job, node)
        | {"MASTER_ADDR": question["address"], "MASTER_PORT": str(question["port"])}
    )


def _follow(ranks: Sequence[_Rank], limit_s: float) -> str:
    """Return why ranks did not end well; after a failure they have little time."""
    due_s = time.monotonic() + limit_s
    failure = ""
    while True:
        is_over = all(rank.process.poll() is not None for rank in ranks)
        if not failure and (failure := _first_failure(ranks)):
            due_s = min(due_s, time.monotonic() + _GRACE_S)
        if is_over:
            return failure
        if time.monotonic() >= due_s:
            return failure or f"the ranks did not end within {limit_s:g} s"
        time.sleep(_POLL_S)


def _first_failure(ranks: Sequence[_Rank]) -> str:
    for rank in ranks:
        code = rank.process.poll()
        if code:
            lines = _read(rank.output_fd).decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it wrote nothing"
            how = f"code {code}" if code > 0 else signal.Signals(-code).name
            return f"ronde bench ended with {how}: {last}"[:_MAX_REASON_CHARS]
    return ""


def _read(fd: int) -> bytes:
    return os.pread(fd, _MAX_LOG_BYTES, 0)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a rank and of what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class PairRates(NamedTuple):
    """What was measured of a pair of hosts."""

    # In GB/s, what the first and what the second of the pair receives.
    rates: tuple[float, float] = (0.0, 0.0)
    # Why there is none; empty where there is one.
    failure: str = ""
    # What looks wrong in NCCL's log, by rule.
    remarks: Mapping[str, Value] = {}


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

    def open(self, hosts: HostSet) -> Mapping[str, str]:
        """Do nothing: each pair meets at a port of its own."""
        del hosts
        return {}

    def measure(
        self, hosts: HostSet, pairs: Sequence[HostPair]
    ) -> dict[HostPair, PairRates]:
        """Start a job for each pair, and read what it measured."""
        holds: dict[str, dict[str, Value]] = {
            first: {"do": "hold_rendezvous", "address": hosts.addresses[first]}
            for first, _ in pairs
        }
        held = hosts.ask(holds, _OFFER_S)
        questions: dict[str, dict[str, Value]] = {}
        for pair in pairs:
            if held[pair[0]].failure:
                continue
            common: dict[str, Value] = {
                "do": "bench",
                "words": self._words,
                "num_ranks": self._num_ranks,
                "address": hosts.addresses[pair[0]],
                **held[pair[0]].values,
                "token": secrets.token_hex(16),
                "environment": hosts.settings.get(ENVIRONMENT, {}),
                "limit_s": _RANKS_S,
                "has_log": self._is_nccl,
            }
            questions |= {h: {**common, "half": half} for half, h in enumerate(pair)}
        replies = hosts.ask(questions, _RANKS_S + _SLACK_S)
        return {
            pair: self._read(pair, [replies.get(h, held[pair[0]]) for h in pair])
            for pair in pairs
        }

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
            complaints = [
                f"{host}: {answer['failure']}"
                for host, answer in zip(pair, answers, strict=True)
                if answer["failure"]
            ]
            failure = "; ".join(complaints) or str(error)
            return PairRates(failure=failure, remarks=remarks)
        return PairRates((rate, rate), remarks=remarks)


def busbw_of(record: str) -> float:
    """Return the bus bandwidth in GB/s of a record's row, or raise ``UsageError``."""
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
            "what": finding.what,
            "remedy": finding.remedy,
        }
        for finding in judge_nccl_log(log)
        if finding.severity is not Level.NOTE
    }


@check(FAIL, FAILURES, WAY)
def pair_job(fleet: Fleet) -> Problems:
    """Any two hosts can run a collective together.

    reads: ronde bench all_reduce on two hosts: a rank a GPU with NCCL, a slot with Gloo
    threshold: each job ends with right sums; a host that always fails is named alone
    source: NVIDIA's nccl-tests: a run with a wrong element has failed
    fix: ronde run -H ONE,OTHER -x NCCL_DEBUG=INFO ronde bench all_reduce shows more.
    needs: several hosts, torch, and --bandwidth gloo or nccl
    why: A job that includes both hosts fails in the same way.
    """
    failures: dict[str, Mapping[str, str]] = {}
    able: set[str] = set()
    way = ""
    for facts in fleet.having(FAILURES, WAY):
        way = facts.values[WAY]
        if way != "tcp":
            failures[facts.host] = facts.values[FAILURES]
            able |= {facts.host} if facts.values.get(RATES) else set()

    def failed(where: str, among: str, reason: str) -> Problem:
        what = f"no all_reduce by {way} {among}: {reason.rstrip('.')}"
        return Problem(what, host=where)

    for host, reasons in failures.items():
        if reasons and host not in able:
            reason = next(iter(reasons.values()))
            yield failed(host, f"with {name_some(reasons)}", reason)
    order = list(failures)
    for host, reasons in failures.items():
        for other, reason in reasons.items():
            if {host, other} <= able and order.index(host) < order.index(other):
                yield failed(name_pair(host, other), "between the two", reason)


@each_host(FAIL, REMARKS, besides=(_PORTS,))
def nccl_choice(values: Values, _: Fleet) -> Problems:
    """NCCL chose the fast way between hosts and between GPUs.

    reads: NCCL's log of these jobs, as ronde topo log reads it
    threshold: no error of ronde topo log, no sockets if RDMA is up; its warnings warn
    source: NCCL's manual on NCCL_DEBUG=INFO; docs/topology-log.md has the rules
    fix: See docs/topology-log.md for the rule that is named.
    needs: several hosts with GPUs, and --bandwidth
    why: By sockets or host memory a tenth of the bandwidth is left, unnoticed.
    """
    # The kernel has an RDMA port that is up, whatever NCCL found.
    ports = values.get(_PORTS, {}).values()
    is_up = any(port["state"] == "ACTIVE" for port in ports)
    for rule, remark in values[REMARKS].items():
        is_bad = remark["is_error"] or (rule == _SOCKETS and is_up)
        what = f"{rule}: {remark['what'].rstrip('.')}"
        yield Problem(what, FAIL if is_bad else WARN, fix=remark["remedy"])
