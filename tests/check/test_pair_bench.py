"""Small jobs on two hosts: real ranks, their results and findings."""

import base64
import json
import secrets
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.check.fleets import of_family
from tests.check.programs import run_step, start_hosts
from tests.limits import HANG_S
from tests.topology.nccl_job import JobLog

from ronde.bench import RankCount, RankSource, Row, Run, Side, to_record
from ronde.check import (
    Family,
    Fleet,
    HostFacts,
    HostSet,
    NodeContext,
    Severity,
    bench,
    busbw_of,
    hold_rendezvous,
    judge,
    judge_logs,
)
from ronde.errors import UsageError
from ronde.launch import Answer

RATES, FAILURES = "network.bandwidth", "network.bandwidth_failures"
WAY, REMARKS = "network.bandwidth_way", "network.nccl_remarks"
LOOPBACK = "127.0.0.1"
FAIL, WARN = Severity.FAIL, Severity.WARN
WORDS = ["all_reduce", "-b", "1K", "-e", "1K", "-n", "1", "--engine", "gloo"]


def findings_of(facts):
    reported = tuple(HostFacts(name, values, {}, {}) for name, values in facts.items())
    findings = judge(Fleet(reported, {}), of_family(Family.NETWORK)).findings
    return [
        (each.check, each.host, each.severity, each.message)
        for each in findings
        if each.check != "link-rate"
    ]


@pytest.mark.parametrize("way", ["tcp", "gloo"])
def test_two_hosts_are_measured(way):
    """Through the programs that real hosts run, with real streams or real ranks."""
    addresses = dict.fromkeys(("a", "b"), LOOPBACK)
    with start_hosts(addresses, {"bandwidth": way}) as hosts:
        run_step("bandwidth", hosts)
    facts = {name: facts.values for name, facts in hosts.facts.items()}
    assert [facts[name][FAILURES] for name in facts] == [{}, {}]
    assert [facts[name][WAY] for name in facts] == [way, way]
    there, back = facts["a"][RATES]["b"], facts["b"][RATES]["a"]
    assert there > 0
    assert back > 0
    assert (there == back) == (way == "gloo")


def test_the_error_of_a_rank_is_reported_with_its_host():
    """Both would reduce on a GPU, and there is none."""
    settings = {"bandwidth": "nccl", "environment": {"CUDA_VISIBLE_DEVICES": ""}}
    with start_hosts(dict.fromkeys(("a", "b"), LOOPBACK), settings) as hosts:
        run_step("bandwidth", hosts)
    facts = {name: facts.values for name, facts in hosts.facts.items()}
    assert all(RATES not in values for values in facts.values())
    reported = findings_of(facts)
    assert [each[:3] for each in reported] == [
        ("pair-job", "a", FAIL),
        ("pair-job", "b", FAIL),
    ]
    assert reported[0][3].startswith("no all_reduce by nccl with b: a: ")
    assert "ended with code" in reported[0][3]


def ask(**changes):
    """Return the question to the first host of a pair."""
    return {
        "words": WORDS,
        "half": 0,
        "num_ranks": 2,
        "address": LOOPBACK,
        "token": "0123",
        "environment": {},
        "limit_s": HANG_S,
        "has_log": False,
    } | changes


@pytest.fixture
def context():
    with ExitStack() as closing:
        yield NodeContext({}, closing)


def held(context):
    return hold_rendezvous(context, {"address": LOOPBACK})


def ranks_of(name):
    """Return the processes that have a job's name in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                f"RONDE_JOB_ID=check-{name}".encode()
                in (folder / "environ").read_bytes()
            ):
                found.append(folder.name)
    return found


def test_ranks_without_partners_are_killed_at_the_limit(context):
    job = secrets.token_hex(8)
    question = ask(**held(context)) | {"limit_s": 0.5, "token": job}
    answer = bench(context, question)
    assert answer["failure"] == "the ranks did not end within 0.5 s"
    assert answer["record"] == ""
    assert ranks_of(job) == []


@pytest.fixture
def run_first(tmp_path):
    """Return a function from a program to an environment whose Python begins so."""

    def write(program):
        (tmp_path / "sitecustomize.py").write_text(program)
        return {"PYTHONPATH": str(tmp_path)}

    return write


WAITING = """\
import os, signal
if os.environ["LOCAL_RANK"] == "1":
    os.write(2, b"it broke\\n")
    os._exit(1)
signal.pause()
"""


def test_a_failed_rank_ends_the_job(context, run_first):
    question = ask(**held(context), environment=run_first(WAITING), limit_s=3600.0)
    reported = bench(context, question, 0.1)
    assert reported["failure"] == "ronde bench ended with code 1: it broke"


LOGGING = """\
import os
with open(os.environ["NCCL_DEBUG_FILE"], "w") as log:
    log.write("word\\n")
os._exit(0)
"""


def test_the_logs_of_ranks_are_returned(context, run_first):
    """In place of NCCL, which writes there where it finds a GPU."""
    question = ask(**held(context), environment=run_first(LOGGING), has_log=True)
    reported = bench(context, question)
    assert reported["failure"] == ""
    assert zlib.decompress(base64.b64decode(reported["log"])) == b"word\nword\n"


def run_of(busbw, *, wrong=0, is_complete=True):
    side = Side(1.0, busbw, busbw, wrong)
    rows = (Row(1024, 256, "float", "sum", -1, None, side),)
    count = RankCount.exactly(2, RankSource.GIVEN)
    return Run(
        test="all_reduce",
        ranks=count,
        rows=rows,
        num_out_of_bounds=wrong,
        is_complete=is_complete,
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("", "must be JSON"),
        (to_record(run_of(1.5, wrong=3)).to_json(), "3 elements of the result are"),
        (to_record(run_of(1.5, is_complete=False)).to_json(), "ended without a result"),
    ],
    ids=["nothing", "wrong", "incomplete"],
)
def test_bad_results_are_refused(record, words):
    with pytest.raises(UsageError, match=words):
        busbw_of(record)


def log_of(**changes):
    """Return NCCL's logs of two hosts."""
    job = JobLog(**changes)
    lines = job.lines()
    half = len(lines) // 2
    return [("\n".join(each) + "\n").encode() for each in (lines[:half], lines[half:])]


def test_sockets_despite_adapters_are_found():
    remarks = judge_logs(log_of(network="Socket", inter="NET/Socket/0"))
    assert remarks["sockets-despite-infiniband"]["is_error"]
    assert remarks["sockets-despite-infiniband"]["remedy"]


def remarked(is_error, rule="sockets-between-nodes"):
    return {
        rule: {"is_error": is_error, "message": "It is slow.", "remedy": "Mend it."}
    }


@pytest.mark.parametrize(
    ("is_error", "state", "severity"),
    [(False, "DOWN", WARN), (True, "DOWN", FAIL), (False, "ACTIVE", FAIL)],
)
def test_sockets_are_a_failure_if_an_adapter_is_up(is_error, state, severity):
    ports = {"network.rdma_ports": {"mlx5_0:1": {"state": state}}}
    reported = findings_of({"a": {REMARKS: remarked(is_error)} | ports})
    what = "sockets-between-nodes: It is slow"
    assert reported == [("nccl-choice", "a", severity, what)]


def failing(pairs, hosts=("a", "b", "c", "d"), way="gloo"):
    """Return facts of hosts that all met; of some pairs, that it failed."""
    facts = {}
    for host in hosts:
        others = [other for other in hosts if other != host]
        bad = {o: "it broke." for o in others if {host, o} in pairs}
        rates = {other: 1.0 for other in others if other not in bad}
        facts[host] = {FAILURES: bad, WAY: way}
        facts[host] |= {RATES: rates} if rates else {}
    return facts


def test_a_host_that_fails_with_all_others_is_reported():
    facts = failing([{"b", other} for other in "acd"])
    assert findings_of(facts) == [
        ("pair-job", "b", FAIL, "no all_reduce by gloo with a, c, d: it broke")
    ]


def test_two_hosts_that_fail_together_are_a_pair():
    assert findings_of(failing([{"b", "c"}])) == [
        ("pair-job", "b - c", FAIL, "no all_reduce by gloo between the two: it broke")
    ]


def chosen(facts, asked="auto"):
    """Return the measured way, given these facts."""
    with start_hosts(dict.fromkeys(facts, ""), {"bandwidth": asked}) as hosts:
        for name, values in facts.items():
            hosts.facts[name].values.update(values)
        run_step("bandwidth", hosts)
    return {f.values[WAY] for f in hosts.facts.values()}


@pytest.mark.parametrize(
    ("second", "way"),
    [
        ({"gpu.count": 8, "versions.torch_build": "CUDA 12.8"}, "nccl"),
        ({"gpu.count": 8, "versions.torch_build": "CPU"}, "tcp"),
        ({"gpu.count": 0, "versions.torch_build": "CUDA 12.8"}, "tcp"),
        ({}, "tcp"),
    ],
    ids=["all", "no-cuda", "no-gpu", "unknown"],
)
def test_nccl_is_chosen_if_all_hosts_have_it(second, way):
    first = {"gpu.count": 8, "versions.torch_build": "CUDA 12.8"}
    assert chosen({"a": first, "b": second}) == {way}


class Recorder:
    """Programs on hosts that hold a port for a job, and break at every job."""

    def __init__(self):
        self.asked = []

    def ask(self, lines, timeout_s):
        questions = [json.loads(line) for line in lines.values()]
        self.asked += questions
        answers = {"hold_rendezvous": {"port": 1, "key": ""}, "bench": {"error": "no"}}
        return {
            name: Answer(json.dumps(answers[question["do"]]), "")
            for name, question in zip(lines, questions, strict=True)
        }


@pytest.mark.parametrize(
    ("engine", "settings", "num"),
    [
        ("nccl", {}, 4),
        ("nccl", {"num_ranks": 16}, 4),
        ("gloo", {"num_ranks": 3}, 3),
    ],
)
def test_the_number_of_ranks_per_host(engine, settings, num):
    programs = Recorder()
    addresses = dict.fromkeys(("a", "b"), LOOPBACK)
    hosts = HostSet(programs, addresses, settings | {"bandwidth": engine})
    for host, num_gpus in (("a", 8), ("b", 4)):
        hosts.facts[host].values["gpu.count"] = num_gpus
    run_step("bandwidth", hosts)
    asked = [each for each in programs.asked if each["do"] == "bench"]
    assert [each["num_ranks"] for each in asked] == [num, num]
