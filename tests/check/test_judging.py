"""All checks on all hosts: findings, unread checks and their order."""

from tests.check.fleets import make_check

from ronde.check import Family, Fleet, HostFacts, Problem, Severity, Unread, judge

HOSTS = (
    HostFacts("a", {"host.x": 1}, {}, {}),
    HostFacts("b", {}, {"host.x": "permission denied"}, {}),
    HostFacts("c", {"host.x": 3}, {}, {}),
)
FLEET = Fleet(HOSTS, {})


def check(name, severity, judge_all):
    return make_check(name, Family.HOST, severity, judge_all, "host.x")


def test_a_check_is_unread_without_its_facts():
    found = judge(FLEET, [check("one", Severity.FAIL, lambda _: iter(()))])
    assert found.made == {("a", Family.HOST): 1, ("c", Family.HOST): 1}
    assert found.unread == (Unread("one", "b", "permission denied"),)


def test_a_check_of_unknown_facts_is_unread():
    def misread(fleet):
        yield Problem(fleet.hosts[0].values["host.y"], host="a")

    found = judge(FLEET, [check("one", Severity.FAIL, misread)])
    assert found.made == {}
    assert found.findings == ()
    assert {each.host for each in found.unread} == {"a", "b", "c"}
    assert "host.y" in found.unread[-1].reason


def test_findings_are_sorted():
    reported = [
        Problem("little", Severity.WARN, host="a"),
        Problem("other", Severity.WARN, "usual", host="c"),
        Problem("less", host="c"),
    ]
    found = judge(FLEET, [check("two", Severity.FAIL, lambda _: iter(reported))])
    assert [each.message for each in found.findings] == ["less", "other", "little"]
