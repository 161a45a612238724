"""On which nodes a number of things could come from."""

from hypothesis import given, strategies as st

from ronde.topology import Hint, counted_hints

counts = st.lists(st.integers(0, 6), min_size=1, max_size=5)


def test_what_no_node_could_ever_hold_alone_is_preferred_on_two():
    hints = counted_hints([4, 4, 4], [4, 4, 4], 6)
    preferred = {hint.mask for hint in hints if hint.is_preferred}
    assert preferred == {0b011, 0b101, 0b110}
    assert Hint(0b111, False) in hints


@given(counts, st.integers(1, 12), st.data())
def test_a_hint_is_each_set_that_has_enough_and_preferred_where_small(
    total, quantity, data
):
    free = [data.draw(st.integers(0, count)) for count in total]
    hints = {h.mask: h.is_preferred for h in counted_hints(total, free, quantity)}

    def amount(mask: int, of: list[int]) -> int:
        return sum(n for bit, n in enumerate(of) if mask >> bit & 1)

    masks = range(1, 1 << len(total))
    able = [mask.bit_count() for mask in masks if amount(mask, total) >= quantity]
    assert hints == {
        mask: mask.bit_count() == min(able)
        for mask in masks
        if amount(mask, free) >= quantity
    }
