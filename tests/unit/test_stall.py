"""Who is missing where, from what each rank says it waits for."""

import pytest

from ronde.coordination import StallReport, describe_stall


@pytest.mark.parametrize(
    ("ages_s", "marks"),
    [
        ((2.4, 2.1), ("!", "!")),
        ((2.0, 1.9), ("", "!")),
        ((1.9, 2.0), ("!", "")),
        ((1.9, 1.9), ("", "")),
    ],
)
def test_who_keeps_others_waiting_for_longer_than_is_allowed_is_marked(ages_s, marks):
    first = StallReport(False, {"gradients.bias": ages_s[0]})
    second = StallReport(False, {"allreduce.alone": ages_s[1]})
    text, is_fatal = describe_stall(
        {0: first, 1: second}, 2, warning_s=1.0, shutdown_s=2.0
    )
    assert is_fatal == ("!" in marks)
    assert f"\n0{marks[0]}: [allreduce.alone]\n" in text
    assert f"\n1{marks[1]}: [gradients.bias]\n" in text
