"""Verdicts on hangs that only simulated jobs have: lost hosts, and roots that go on."""

from tests.monitor.jobs import make_table, make_usage

from ronde.monitor import explain_hang, find_evidence
from ronde.status import UNKNOWN, PendingCollective

CALL = PendingCollective("all_reduce", "default", "all_reduce", 5, 0, 9.0)


def judge(calls, **states):
    """Return a job whose ranks are in these calls, or in a state; and its verdict."""
    rows = []
    for row, call in zip(make_table(len(calls)).workers, calls, strict=True):
        own = (call,) if call else ()
        status = row.status._replace(collectives=own, num_collectives=len(own))
        state = states.get(f"rank{row.rank}", "running")
        code = -9 if state == "ended" else None
        rows.append(row._replace(status=status, state=state, exit_code=code))
    table = make_table(len(calls))._replace(workers=tuple(rows))
    return table, explain_hang(table, {})


def explain(calls, **states):
    return [tuple(fault) for fault in judge(calls, **states)[1].faults]


def test_dead_and_lost_ranks_are_named():
    dead, lost = explain((CALL, CALL, None, None), rank2="ended", rank3="lost")
    assert dead[:2] == ("dead", (2,))
    assert "was killed by SIGKILL before all_reduce" in dead[2]
    assert lost == ("dead", (3,), "Rank 3 (node0, pid 1003) was lost with its host.")


def test_a_root_in_a_later_call_is_not_awaited():
    later = CALL._replace(sequence=6)
    (fault,) = explain((later, CALL, CALL, None))
    assert fault[:2] == ("silent", (3,))


def test_another_operation_of_the_same_number_is_a_mismatch():
    other = CALL._replace(name="broadcast", kind="broadcast")
    (fault,) = explain((other, CALL, CALL, CALL))
    assert fault[:2] == ("mismatch", (0,))


def test_a_call_of_unknown_ranks_blames_none():
    call = CALL._replace(ranks=(UNKNOWN,))
    assert explain((call, call, None)) == []


def test_a_call_that_all_ranks_are_in_blames_none_but_has_causes():
    ((kind, ranks, text),) = explain((CALL, CALL))
    assert (kind, ranks) == ("inside", ())
    assert "the network or a driver does not move the data" in text


def test_faults_of_two_kinds_are_both_found():
    """Ranks 0 and 1 wait for each other in two groups, and ranks 2 and 3 in one."""
    first, second = (CALL._replace(group=g, ranks=(0, 1)) for g in ("a", "b"))
    pair = CALL._replace(group="c", ranks=(2, 3))
    other = pair._replace(name="broadcast", kind="broadcast")
    found = explain((first, second, other, pair))
    assert [each[:2] for each in found] == [("mismatch", (2, 3)), ("order", (0, 1))]


def test_facts_of_hosts_at_fault_are_shown():
    usage = make_usage(range(8), at_s=1.0, num_gpus=1)
    gpu = usage.gpus[0]._replace(throttled_by=("HW thermal slowdown",))
    link = usage.interfaces[0]._replace(num_errors=1200)
    full = usage._replace(memory_bytes=1 << 40, interfaces=(link,), gpus=(gpu,))
    table, verdict = judge([*[CALL] * 15, None])
    assert find_evidence(verdict, table, {"node0": full, "node1": usage}) == []
    usages = {"node0": usage, "node1": full._replace(gpu_problem="NVML hangs")}
    assert find_evidence(verdict, table, usages) == [
        "The GPUs of node1 cannot be read: NVML hangs.",
        "GPU 0 of node1 is throttled (HW thermal slowdown).",
        "The memory of node1 is full.",
        "Interface eth0 of node1 has had 1,200 errors since boot.",
    ]
