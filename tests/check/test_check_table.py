"""The table of hosts, the findings below it, and the verdict."""

import json

import pytest
from tests.check.fleets import CHECKS, make_fleet

from ronde import __version__
from ronde.check import (
    Changes,
    Family,
    Finding,
    Judgement,
    Severity,
    Unread,
    decide,
    fit_together,
    judge,
    name_pair,
)
from ronde.render import (
    checked_as_json,
    draw_findings,
    draw_unread,
    draw_verdict,
    tabulate_hosts,
)

NETWORK = Family.NETWORK


def table(fleet, **options):
    names = [facts.host for facts in fleet.hosts]
    return tabulate_hosts(names, judge(fleet, CHECKS), CHECKS, **options)


def judged(findings, unread=()):
    return Judgement(tuple(findings), tuple(unread), {})


def rows(text):
    return [line.split() for line in text.splitlines()]


def verdict(fleet):
    names = [facts.host for facts in fleet.hosts]
    findings = judge(fleet, CHECKS).findings
    return draw_verdict(decide(names, judged(findings), len(names)), findings)


def test_each_mark_is_the_worst_of_its_cell():
    fleet = make_fleet(4, node2={"memlock": 8, "governor": "powersave"})
    assert rows(table(fleet)) == [
        ["name", "versions", "gpu", "host", "network"],
        ["node[1,3-4]", "ok", "-", "ok", "-"],
        ["node2", "ok", "-", "x", "-"],
    ]
    fleet = make_fleet(4, node2={"governor": "powersave"})
    assert rows(table(fleet))[2] == ["node2", "ok", "-", "!", "-"]


def test_a_partly_read_family_is_not_ok():
    fleet = make_fleet(1)
    unread = Unread("gpu-heat", "node1", "no reading")
    made = {("node1", Family.GPU): 5, ("node1", Family.HOST): 2}
    judgement = Judgement((), (unread,), made)
    names = [facts.host for facts in fleet.hosts]
    shown = rows(tabulate_hosts(names, judgement, CHECKS))
    assert shown[1] == ["node1", "-", "?", "ok", "-"]


def test_a_host_with_unknown_gpus_is_not_ready():
    names = ["a", "b", "c", "d"]
    unread = [Unread("gpu-count", host, "no nvidia-smi") for host in "cd"]
    bad = Finding("memlock", Severity.FAIL, "d", "8MiB")
    decided = decide(names, judged([bad], unread), 4)
    assert (decided.ready, decided.faulty, decided.unknown) == (
        ("a", "b"),
        ("d",),
        ("c",),
    )
    assert draw_verdict(decided, [bad]) == (
        "2 of 4 hosts are ready\n"
        "unknown whether c is ready: the GPUs cannot be queried\n"
        "d is not ready: memlock\n"
    )
    assert fit_together(names, decided, is_strict=False) == ("a", "b")


def test_equal_findings_are_reported_once():
    odd = {f"node{n}": {"memlock": 8} for n in (3, 4, 5)}
    findings = judge(make_fleet(8, **odd), CHECKS).findings
    assert draw_findings(findings) == (
        "x locked-memory: node[3-5]\n"
        "    8 GiB can be locked\n"
        "    fix: ulimit -l unlimited\n"
    )


def test_a_hundred_values_are_shortened():
    odd = {f"node{n}": {"memlock": n % 31} for n in range(1, 101)}
    text = draw_findings(judge(make_fleet(100, **odd), CHECKS).findings)
    assert "more\n" in text
    assert len(text.splitlines()) < 20


def test_unread_checks_of_one_reason_are_together():
    unread = [Unread(c, h, "no root") for c in ("a", "b") for h in ("n1", "n2")]
    assert draw_unread(unread).splitlines()[1:] == ["? n[1-2]: no root (a, b)"]


@pytest.mark.parametrize(
    ("num_hosts", "odd", "last"),
    [
        (1, {}, "1 of 1 host is ready"),
        (3, {}, "3 of 3 hosts are ready"),
        (1, {"node1": {"memlock": 8}}, "node1 is not ready: locked-memory"),
        (
            4,
            {"node2": {"governor": "powersave"}},
            "4 of 4 hosts are ready, with warnings on 1 of them",
        ),
        (
            3,
            {"node2": {"memlock": 8, "torch": "2.11"}},
            "1 of 3 ... node2 is not ready: torch, locked-memory",
        ),
    ],
)
def test_the_verdict_is_the_last_line(num_hosts, odd, last):
    reported = verdict(make_fleet(num_hosts, **odd)).splitlines()
    assert reported[-1] == last.rpartition("... ")[2]


def pair(host, other, severity=Severity.FAIL):
    return Finding("latency", severity, name_pair(host, other), "slow")


def test_a_pair_that_is_not_ready_is_marked_on_both_hosts():
    names = [f"node{n}" for n in range(1, 5)]
    found = (pair("node1", "node2"),)
    judgement = Judgement(found, (), dict.fromkeys(((n, NETWORK) for n in names), 1))
    assert rows(tabulate_hosts(names, judgement, CHECKS)) == [
        ["name", "versions", "gpu", "host", "network"],
        ["node[1-2]", "-", "-", "-", "x"],
        ["node[3-4]", "-", "-", "-", "ok"],
    ]
    decided = decide(names, judged(found), 4)
    assert decided.is_faulty
    assert decided.ready == tuple(names)
    assert draw_verdict(decided, found) == (
        "4 of 4 hosts are ready by themselves\n"
        "node1 - node2 are not ready together: latency\n"
    )
    reported = json.loads(checked_as_json((), judgement, decided, exit_code=2))
    assert reported["verdict"]["not_ready_pairs"] == [["node1", "node2"]]
    assert reported["verdict"]["not_ready"] == reported["verdict"]["warned_pairs"] == []


def test_a_pair_with_a_warning_is_a_warning():
    found = [pair("a", "b", Severity.WARN)]
    decided = decide(["a", "b"], judged(found), 2)
    assert decided.is_warned
    assert not decided.is_faulty
    assert draw_verdict(decided, found) == (
        "2 of 2 hosts are ready, with warnings on 1 pair\n"
    )
    both = [*found, Finding("governor", Severity.WARN, "a", "slow")]
    assert draw_verdict(decide(["a", "b"], judged(both), 2), both).endswith(
        "with warnings on 1 of them and on 1 pair\n"
    )
    inform = [pair("a", "b", Severity.INFORM)]
    assert not decide(["a", "b"], judged(inform), 2).is_warned


@pytest.mark.parametrize(
    ("pairs", "good", "strictly_good"),
    [
        ([], "abcde", "abcd"),
        ([("a", "b")], "acde", "acd"),
        ([("a", "b"), ("c", "d")], "ace", "ac"),
        # Of a host that several are not ready with, the others are not robbed.
        ([("a", "c"), ("a", "d"), ("b", "a")], "bcde", "bcd"),
        ([("a", "b"), ("b", "c"), ("c", "d")], "ade", "ad"),
    ],
)
def test_no_two_hosts_of_a_host_file_are_not_ready_together(pairs, good, strictly_good):
    found = [pair(*each) for each in pairs]
    found += [Finding("governor", Severity.WARN, "e", "slow")]
    found += [Finding("governor", Severity.FAIL, "f", "slow"), pair("f", "a")]
    decided = decide("abcdef", judged(found), 6)
    assert "".join(fit_together("abcdef", decided, is_strict=False)) == good
    assert "".join(fit_together("abcdef", decided, is_strict=True)) == strictly_good


def test_json_holds_facts_findings_and_verdict():
    fleet = make_fleet(3, node2={"memlock": 8})
    judgement = judge(fleet, CHECKS)
    names = [facts.host for facts in fleet.hosts]
    decided = decide(names, judgement, 3)
    changes = Changes((), (), (), ("node3",), ())
    reported = json.loads(
        checked_as_json(fleet.hosts, judgement, decided, exit_code=2, changes=changes)
    )
    assert (reported["form"], reported["schema"], reported["ronde"]) == (
        "ronde-check",
        1,
        __version__,
    )
    assert [host["host"] for host in reported["hosts"]] == names
    assert reported["hosts"][1]["values"]["host.memlock_gib"] == 8
    assert reported["findings"] == [
        {
            "check": "locked-memory",
            "severity": "fail",
            "host": "node2",
            "message": "8 GiB can be locked",
            "usual": "",
            "fix": "ulimit -l unlimited",
        }
    ]
    assert {each["check"] for each in reported["unread"]} == {"gpu-heat"}
    assert reported["verdict"] == {
        "exit_code": 2,
        "ready": ["node1", "node3"],
        "warned": [],
        "not_ready": ["node2"],
        "unknown": [],
        "warned_pairs": [],
        "not_ready_pairs": [],
    }
    assert reported["changes"]["new_hosts"] == ["node3"]
