"""Small jobs of two hosts: real ranks, what they measure, and what is made of it."""

import base64
import socket
import threading
import time
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.check.fleets import of_family
from tests.check.programs import panel_of
from tests.topology.nccl_job import JobLog

from ronde.bench import RankCount, RankSource, Row, Run, Side, to_record
from ronde.check import (
    Family,
    Fleet,
    HostFacts,
    NodeContext,
    Severity,
    busbw_of,
    judge,
    judge_logs,
)
from ronde.check.network import bandwidth as steps
from ronde.errors import UsageError

LOOPBACK = "127.0.0.1"
FAIL, WARN = Severity.FAIL, Severity.WARN
WORDS = ["all_reduce", "-b", "1K", "-e", "1K", "-n", "1", "--engine", "gloo"]


def findings_of(facts):
    told = tuple(HostFacts(name, values, {}, {}) for name, values in facts.items())
    findings = judge(Fleet(told, {}), of_family(Family.NETWORK)).findings
    return [(each.check, each.host, each.severity, each.what) for each in findings]


def test_two_hosts_reduce_together():
    """Through the programs that real hosts run; the ranks are real, and so is Gloo."""
    with panel_of(dict.fromkeys(("a", "b"), LOOPBACK), {"bandwidth": "gloo"}) as panel:
        steps.run(panel)
    facts = {name: facts.values for name, facts in panel.facts.items()}
    assert [facts[name][steps.FAILURES] for name in facts] == [{}, {}]
    assert [facts[name][steps.WAY] for name in facts] == ["gloo", "gloo"]
    rate = facts["a"][steps.RATES]["b"]
    assert facts["b"][steps.RATES] == {"a": rate}
    # Any machine passes on a megabyte a second to itself; none a petabyte.
    assert 0.001 < rate < 1e6


def test_what_a_rank_complains_of_is_told_with_its_host():
    """Both would reduce on a GPU, and there is none."""
    settings = {"bandwidth": "nccl", "environment": {"CUDA_VISIBLE_DEVICES": ""}}
    with panel_of(dict.fromkeys(("a", "b"), LOOPBACK), settings) as panel:
        steps.run(panel)
    facts = {name: facts.values for name, facts in panel.facts.items()}
    assert all(steps.RATES not in values for values in facts.values())
    told = findings_of(facts)
    assert [each[:3] for each in told] == [
        ("pair-job", "a", FAIL),
        ("pair-job", "b", FAIL),
    ]
    assert told[0][3].startswith("no all_reduce by nccl with b: a: ")
    assert "ended with code" in told[0][3]


def ask(**changes):
    """Return the question to the first host of a pair."""
    return {
        "words": WORDS,
        "half": 0,
        "num_ranks": 2,
        "address": LOOPBACK,
        "token": "0123",
        "environment": {},
        "limit_s": 60.0,
        "has_log": False,
    } | changes


@pytest.fixture
def site():
    with ExitStack() as closing:
        yield NodeContext({}, closing)


def held(site):
    return steps.hold_rendezvous(site, {"address": LOOPBACK})


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


def test_ranks_whose_partners_never_come_are_killed_at_their_limit(site):
    question = ask(**held(site), limit_s=0.5) | {"token": "f00d"}
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(steps.bench(site, question))
    )
    asking.start()
    due_s = time.monotonic() + 60
    while asking.is_alive() and not ranks_of("f00d") and time.monotonic() < due_s:
        time.sleep(0.01)
    asking.join(60)
    assert answers[0]["failure"] == "the ranks did not end within 0.5 s"
    assert answers[0]["record"] == ""
    assert ranks_of("f00d") == []


WAITING = """\
import os, sys, time
if os.environ["LOCAL_RANK"] == "1":
    sys.exit("it broke")
time.sleep(600)
"""


def test_who_waits_for_a_rank_that_failed_is_not_waited_for(site, monkeypatch):
    monkeypatch.setattr(steps, "_BOOT", WAITING)
    monkeypatch.setattr(steps, "_GRACE_S", 0.1)
    told = steps.bench(site, ask(**held(site), limit_s=300.0))
    assert told["failure"] == "ronde bench ended with code 1: it broke"


SAYING = "import os; open(os.environ['NCCL_DEBUG_FILE'], 'w').write('word\\n')"


def test_what_ranks_say_to_a_file_of_their_own_comes_back_packed(site, monkeypatch):
    """In place of NCCL, which writes there where it finds a GPU."""
    monkeypatch.setattr(steps, "_BOOT", SAYING)
    told = steps.bench(site, ask(**held(site), has_log=True))
    assert told["failure"] == ""
    assert zlib.decompress(base64.b64decode(told["log"])) == b"word\nword\n"


def test_a_port_is_held_for_one_job_alone(site):
    place = held(site)
    assert place["port"] > 0
    steps.bench(site, ask(**place, limit_s=0.0))
    assert site.memory == {}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, place["port"]))


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


def test_a_record_tells_its_bandwidth():
    assert busbw_of(to_record(run_of(1.5)).to_json()) == 1.5


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("", "must be JSON"),
        (to_record(run_of(1.5, wrong=3)).to_json(), "3 elements of the sums are wrong"),
        (to_record(run_of(1.5, is_complete=False)).to_json(), "measured nothing"),
        (to_record(run_of(None)).to_json(), "measured nothing"),
    ],
    ids=["nothing", "wrong", "incomplete", "empty"],
)
def test_what_is_no_result_is_not_taken_for_one(record, words):
    with pytest.raises(UsageError, match=words):
        busbw_of(record)


def log_of(**changes):
    """Return what NCCL says on each of two hosts."""
    job = JobLog(**changes)
    lines = job.lines()
    half = len(lines) // 2
    return [("\n".join(each) + "\n").encode() for each in (lines[:half], lines[half:])]


def test_of_a_healthy_job_there_is_nothing_to_remark():
    assert judge_logs(log_of()) == {}


def test_sockets_despite_adapters_are_remarked():
    remarks = judge_logs(log_of(network="Socket", inter="NET/Socket/0"))
    assert remarks["sockets-despite-infiniband"]["is_error"]
    assert remarks["sockets-despite-infiniband"]["remedy"]


def remarked(is_error, rule="sockets-between-nodes"):
    return {rule: {"is_error": is_error, "what": "It is slow.", "remedy": "Mend it."}}


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ({steps.REMARKS: remarked(is_error=False)}, WARN),
        ({steps.REMARKS: remarked(is_error=True)}, FAIL),
        (
            {
                steps.REMARKS: remarked(is_error=False),
                "network.rdma_ports": {"mlx5_0:1": {"state": "ACTIVE"}},
            },
            FAIL,
        ),
        (
            {
                steps.REMARKS: remarked(is_error=False),
                "network.rdma_ports": {"mlx5_0:1": {"state": "DOWN"}},
            },
            WARN,
        ),
    ],
    ids=["warning", "error", "adapter", "adapter-down"],
)
def test_sockets_are_worse_where_an_adapter_is_up(values, severity):
    told = findings_of({"a": values})
    what = "sockets-between-nodes: It is slow"
    assert told == [("nccl-choice", "a", severity, what)]


def failing(pairs, hosts=("a", "b", "c", "d"), way="gloo"):
    """Return facts of hosts that all met; of some pairs, that it failed."""
    facts = {}
    for host in hosts:
        others = [other for other in hosts if other != host]
        bad = {o: "it broke." for o in others if {host, o} in pairs}
        rates = {other: 1.0 for other in others if other not in bad}
        facts[host] = {steps.FAILURES: bad, steps.WAY: way}
        facts[host] |= {steps.RATES: rates} if rates else {}
    return facts


def test_a_host_that_can_do_it_with_nobody_is_told_alone():
    facts = failing([{"b", other} for other in "acd"])
    assert findings_of(facts) == [
        ("pair-job", "b", FAIL, "no all_reduce by gloo with a, c, d: it broke")
    ]


def test_two_that_can_do_it_with_others_are_told_as_a_pair():
    assert findings_of(failing([{"b", "c"}])) == [
        ("pair-job", "b - c", FAIL, "no all_reduce by gloo between the two: it broke")
    ]


def test_where_nobody_can_do_it_all_are_told():
    hosts = ("a", "b", "c")
    pairs = [{"a", "b"}, {"a", "c"}, {"b", "c"}]
    assert [each[1] for each in findings_of(failing(pairs, hosts))] == list(hosts)


def test_streams_that_fail_are_told_by_other_checks():
    assert findings_of(failing([{"b", "c"}], way="tcp")) == []


def chosen(facts, asked="auto"):
    """Return what is measured, with which facts known before."""
    with panel_of(dict.fromkeys(facts, ""), {"bandwidth": asked}) as panel:
        for name, values in facts.items():
            panel.facts[name].values.update(values)
        steps.run(panel)
    return {f.values[steps.WAY] for f in panel.facts.values()}


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
def test_nccl_is_chosen_where_all_hosts_have_it(second, way):
    first = {"gpu.count": 8, "versions.torch_build": "CUDA 12.8"}
    assert chosen({"a": first, "b": second}) == {way}


@pytest.mark.parametrize(
    ("engine", "settings", "num"),
    [
        ("nccl", {}, 4),
        ("nccl", {"num_ranks": 2}, 2),
        ("nccl", {"num_ranks": 16}, 4),
        ("gloo", {}, 1),
        ("gloo", {"num_ranks": 3}, 3),
    ],
)
def test_how_many_ranks_a_host_of_a_pair_has(engine, settings, num):
    with panel_of({"a": "", "b": ""}, settings) as panel:
        for host, num_gpus in (("a", 8), ("b", 4)):
            panel.facts[host].values["gpu.count"] = num_gpus
        assert steps._num_ranks(panel, engine) == num
