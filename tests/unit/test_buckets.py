"""The plan of gradients into buckets."""

from hypothesis import given, strategies as st

from ronde.data_parallel import (
    ALIGNMENT_BYTES,
    BucketLimits,
    GradientSpec,
    plan_buckets,
)

ITEM_SIZES = {"a": 2, "b": 8}
SPECS = st.lists(
    st.builds(
        lambda numel, kind: GradientSpec(numel, ITEM_SIZES[kind], kind),
        st.integers(0, 5000),
        st.sampled_from(sorted(ITEM_SIZES)),
    ),
    max_size=40,
)
LIMITS = st.builds(
    BucketLimits,
    first_bytes=st.integers(1, 1 << 14),
    other_bytes=st.integers(1, 1 << 16),
)


@st.composite
def problems(draw):
    """Draw gradients, an order of some of them, and disjoint groups."""
    specs = draw(SPECS)
    order = draw(st.permutations(range(len(specs))))
    order = order[: draw(st.integers(0, len(specs)))]
    members = draw(st.permutations(range(len(specs))))
    cut = draw(st.integers(0, len(specs)))
    return specs, order, draw(LIMITS), [members[: cut // 2], members[cut // 2 : cut]]


@given(problems())
def test_every_gradient_has_one_place(problem):
    specs, order, limits, groups = problem
    buckets = plan_buckets(specs, order, limits, groups)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted(slot.index for slot in slots) == sorted(order)
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            spec = specs[slot.index]
            assert spec.kind == bucket.kind
            assert slot.numel == spec.numel
            assert slot.offset >= end
            assert slot.offset * spec.itemsize % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.numel
        assert bucket.numel >= end


@given(problems())
def test_groups_share_a_bucket_and_nothing_else_does(problem):
    specs, order, limits, groups = problem
    buckets = plan_buckets(specs, order, limits, groups)
    home = {slot.index: b for b, bucket in enumerate(buckets) for slot in bucket.slots}
    for group in groups:
        for kind in ("a", "b"):
            members = [i for i in group if i in home and specs[i].kind == kind]
            homes = {home[i] for i in members}
            assert len(homes) <= 1
            for bucket in homes:
                assert {s.index for s in buckets[bucket].slots} == set(members)


@given(problems())
def test_buckets_respect_their_limits(problem):
    specs, order, limits, _ = problem
    buckets = plan_buckets(specs, order, limits)
    largest = max(limits.first_bytes, limits.other_bytes)
    for bucket in buckets:
        all_but_last = bucket.slots[-1].offset * ITEM_SIZES[str(bucket.kind)]
        assert all_but_last < largest


def test_gradients_keep_the_order_of_arrival():
    specs = [GradientSpec(100, 4, "x") for _ in range(6)]
    limits = BucketLimits(first_bytes=400, other_bytes=500)
    buckets = plan_buckets(specs, [5, 3, 4, 0, 1, 2], limits)
    order = [[slot.index for slot in bucket.slots] for bucket in buckets]
    assert order == [[5], [3, 4], [0, 1], [2]]
