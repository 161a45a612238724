"""Errors that links count between a first and a second look."""

from hypothesis import given, strategies as st
from tests.check.programs import panel_of

from ronde.check.catalogue import all_checks
from ronde.check.check import Fleet, HostFacts, Severity
from ronde.check.judging import judge
from ronde.check.network.rdma import (
    RDMA_ERRORS,
    RDMA_GROWTH,
    STEP,
    compare_counts,
    read_errors,
)

CHECKS = tuple(each for each in all_checks() if each.id == "rdma-errors")
PORT = "sys/class/infiniband/mlx5_0/ports/1"


def count(root, **counts):
    """Have the port of a saved tree show counters: ``counters__symbol_error=3``."""
    for name, number in counts.items():
        file = root / PORT / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{number}\n")


def judged(values):
    return judge(Fleet((HostFacts("a", values, {}, {}),), {}), CHECKS)


def test_errors_are_read_by_port_as_far_as_they_are_counted(tmp_path):
    count(tmp_path, counters__symbol_error=7, hw_counters__out_of_sequence=0)
    count(tmp_path, counters__port_rcv_data=99, counters__link_downed="N/A (no PMA)")
    assert read_errors(str(tmp_path)) == {
        "mlx5_0:1": {"symbol_error": 7, "out_of_sequence": 0}
    }
    assert read_errors(str(tmp_path / "none")) == {}


def test_counters_of_a_virtual_function_are_left_alone(tmp_path):
    count(tmp_path, counters__symbol_error=7)
    (tmp_path / "sys/class/infiniband/mlx5_0/device/physfn").mkdir(parents=True)
    assert read_errors(str(tmp_path)) == {}


def test_what_grows_between_two_looks_is_told_and_what_was_there_is_not(tmp_path):
    count(tmp_path, counters__symbol_error=7, counters__port_rcv_errors=100)
    with panel_of({"a": ""}, {"root": str(tmp_path)}) as panel:
        panel.note("a", RDMA_ERRORS, read_errors(str(tmp_path)))
        count(tmp_path, counters__symbol_error=9)
        STEP.run(panel)
    (facts,) = panel.facts.values()
    assert facts.values[RDMA_GROWTH] == {"mlx5_0:1": {"symbol_error": 2}}
    (finding,) = judged(facts.values).findings
    assert (finding.check, finding.severity) == ("rdma-errors", Severity.WARN)
    assert finding.what == "mlx5_0:1: symbol_error by 2 more during the check"


def test_a_host_without_adapters_is_not_asked_again(tmp_path):
    with panel_of({"a": ""}, {"root": str(tmp_path)}) as panel:
        panel.note("a", RDMA_ERRORS, {})
        panel._programs.programs["a"].kill()
        STEP.run(panel)
        assert panel.facts["a"].unreadable == {}


def test_what_cannot_be_read_again_says_why():
    with panel_of({"a": ""}) as panel:
        panel.note("a", RDMA_ERRORS, {"mlx5_0:1": {"symbol_error": 1}})
        panel._programs.programs["a"].kill()
        panel._programs.programs["a"].wait()
        STEP.run(panel)
    (facts,) = panel.facts.values()
    assert facts.unreadable == {RDMA_GROWTH: "its program has ended"}


COUNTS = st.dictionaries(
    st.sampled_from("ab"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9))
)


@given(COUNTS, COUNTS)
def test_only_what_grew_of_what_was_counted_before_has_grown(before, after):
    for port, counts in compare_counts(before, after).items():
        for name, grown in counts.items():
            assert grown == after[port][name] - before[port][name] > 0
    assert compare_counts(before, before) == {}


def test_a_counter_that_is_reset_has_not_grown():
    before = {"mlx5_0:1": {"symbol_error": 9}}
    assert compare_counts(before, {"mlx5_0:1": {"symbol_error": 1}}) == {}
