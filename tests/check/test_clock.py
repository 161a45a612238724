"""How far clocks are apart."""

import math
import time

from hypothesis import given, strategies as st
from tests.check.programs import run_step, start_hosts

from ronde.check import Reply, estimate_offset

OFFSET, ERROR = "cluster.clock_offset_s", "cluster.clock_error_s"


@given(st.floats(-100, 100), st.floats(0, 5), st.floats(0, 5), st.floats(0, 1e4))
def test_the_true_offset_lies_within_the_error(offset_s, going_s, coming_s, asked_s):
    read_s = 1e6 + asked_s + going_s + offset_s
    answered_s = asked_s + going_s + coming_s
    reply = Reply({"time_ns": round(read_s * 1e9)}, "", asked_s, answered_s)
    found = estimate_offset(reply, 1e6)
    rounding_s = 1e-8 + 16 * math.ulp(read_s)
    assert abs(found[0] - offset_s) <= found[1] + rounding_s


def test_programs_on_one_machine_have_one_clock():
    with start_hosts({"a": "", "b": ""}) as hosts:
        begun_s = time.monotonic()
        run_step("clock", hosts)
        took_s = time.monotonic() - begun_s
    for facts in hosts.facts.values():
        offset_s, error_s = facts.values[OFFSET], facts.values[ERROR]
        # Monotonic and wall clock are read one after the other, hence the slack.
        assert abs(offset_s) <= error_s + 0.05
        assert 0 < error_s < took_s
