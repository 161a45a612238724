"""All checks on all hosts: what was made, what was not, and in which order."""

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


def test_a_check_counts_where_its_facts_are_and_is_unread_elsewhere():
    found = judge(FLEET, [check("one", Severity.FAIL, lambda _: iter(()))])
    assert found.made == {("a", Family.HOST): 1, ("c", Family.HOST): 1}
    assert found.unread == (Unread("one", "b", "permission denied"),)


def test_a_check_that_meets_facts_it_does_not_know_was_not_made():
    def misread(fleet):
        yield Problem(fleet.hosts[0].values["host.y"], host="a")

    found = judge(FLEET, [check("one", Severity.FAIL, misread)])
    assert found.made == {}
    assert found.findings == ()
    assert {each.host for each in found.unread} == {"a", "b", "c"}
    assert "host.y" in found.unread[-1].reason


def test_the_worst_comes_first_and_what_differs_before_what_is_too_little():
    reported = [
        Problem("little", Severity.WARN, host="a"),
        Problem("other", Severity.WARN, "usual", host="c"),
        Problem("less", host="c"),
    ]
    found = judge(FLEET, [check("two", Severity.FAIL, lambda _: iter(reported))])
    assert [each.message for each in found.findings] == ["less", "other", "little"]
