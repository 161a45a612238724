"""Ranks are placed within what there is, aligned or refused."""

import pytest
from hypothesis import example, given, strategies as st
from tests.topology.inventories import homes, inventory

from ronde.errors import UsageError
from ronde.topology import (
    UNKNOWN_NODE,
    AlignmentRequest,
    BindMode,
    Core,
    Machine,
    Nearness,
    PlacementError,
    Policy,
    Scope,
    bind,
    place,
)

STRICT = {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE}
TWO_SOCKETS = inventory({0: 16, 1: 16}, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nics=8)


@pytest.mark.parametrize("policy", Policy)
def test_ranks_have_the_cores_of_their_gpus_node_and_nobody_elses(policy):
    places = place(TWO_SOCKETS, AlignmentRequest(8, policy))
    assert homes(places) == [{0}] * 4 + [{1}] * 4
    assert [each.gpus for each in places] == [(n,) for n in range(8)]
    assert [len(each.cores) for each in places] == [4] * 8
    assert len({cpu for each in places for cpu in each.cpus}) == 64
    assert all(each.is_preferred for each in places)


def test_a_strict_policy_looks_for_room_where_even_blocks_would_be_torn():
    whole = inventory({0: 3, 1: 4})
    assert homes(place(whole, AlignmentRequest(2))) == [{0, 1}, {1}]
    strict = place(whole, AlignmentRequest(2, Policy.RESTRICTED))
    assert homes(strict) == [{1}, {0}]
    lax = place(whole, AlignmentRequest(2))
    assert [each.is_preferred for each in lax] == [False, True]


def test_free_cores_that_are_scattered_are_no_alignment():
    whole = inventory({0: 3, 1: 3})
    with pytest.raises(PlacementError) as refused:
        place(whole, AlignmentRequest(3, Policy.RESTRICTED))
    assert str(refused.value) == (
        "policy restricted refuses rank 2 on n1: "
        "cpu: 2 cores not on fewer than nodes 0+1 together (free: 1 on node 0, 1 on "
        "node 1). Use fewer ranks, or best-effort."
    )


def test_more_cores_than_a_node_has_are_aligned_on_two_and_on_one_refused():
    whole = inventory({0: 4, 1: 4, 5: 4, 9: 4})
    first, second = place(whole, AlignmentRequest(2, Policy.RESTRICTED))
    assert (first.nodes, first.is_preferred) == ((0, 1), True)
    assert second.nodes == (5, 9)
    with pytest.raises(PlacementError, match="rank 0 on n1: cpu: 8 cores not on fewer"):
        place(whole, AlignmentRequest(2, Policy.SINGLE_NUMA_NODE))


def test_a_gpu_whose_node_is_unknown_has_no_preference():
    whole = inventory({0: 2, 1: 2}, gpus=(UNKNOWN_NODE, 1))
    places = place(whole, AlignmentRequest(2, Policy.SINGLE_NUMA_NODE))
    assert homes(places) == [{0}, {1}]


def test_a_gpu_near_cores_that_may_not_be_used_is_reported():
    whole = inventory({0: 4}, gpus=(1,))
    (best,) = place(whole, AlignmentRequest(1))
    assert best.reasons == ("gpu: GPU 0 near no node with usable cores",)
    with pytest.raises(PlacementError, match="GPU 0 near no node"):
        place(whole, AlignmentRequest(1, Policy.RESTRICTED))


def test_a_gpu_and_cores_on_different_nodes_are_both_named():
    # The first rank takes what the second needs near its GPU.
    whole = inventory({0: 2, 1: 2}, gpus=(UNKNOWN_NODE, 0))
    with pytest.raises(PlacementError) as refused:
        place(whole, AlignmentRequest(2, Policy.RESTRICTED))
    reasons = "rank 1 on n1: gpu: GPU 1 only on node 0; cpu: 2 cores only on node 1. "
    assert reasons in str(refused.value)


def test_fewer_cores_than_ranks_are_shared_by_all():
    places = place(inventory({0: 2}), AlignmentRequest(3, Policy.RESTRICTED))
    assert [each.cpus for each in places] == [(0, 1, 2, 3)] * 3
    assert not any(each.share.has_enough for each in places)


def test_of_adapters_class_counts_first_then_bandwidth_then_how_often():
    near = {
        (gpu, nic): Nearness((kind, -rate))
        for gpu in range(4)
        for nic, (kind, rate) in enumerate([(8, 48), (4, 12), (4, 24), (4, 24)])
    }
    whole = inventory({0: 4}, gpus=(0,) * 4, nics=4, near=near)
    places = place(whole, AlignmentRequest(4))
    assert [each.nics for each in places] == [(2,), (3,), (2,), (3,)]


def test_a_job_is_aligned_as_one():
    request = AlignmentRequest(4, Policy.RESTRICTED, Scope.JOB)
    places = place(inventory({0: 4, 1: 4}, gpus=(0, 0, 1, 1)), request)
    assert {each.nodes for each in places} == {(0, 1)}
    assert homes(places) == [{0}, {0}, {1}, {1}]
    alternating = inventory({0: 16, 1: 4}, gpus=(0, 1, 0, 0, 0))
    with pytest.raises(PlacementError) as refused:
        place(alternating, request)
    assert "restricted refuses ranks 0-3 on n1 together: gpu: GPUs" in str(
        refused.value
    )


def test_many_nodes_are_too_many_unless_nothing_is_aligned():
    whole = inventory(dict.fromkeys(range(17), 1))
    with pytest.raises(
        UsageError, match="at most 16 memory nodes with cores, but the host has 17"
    ):
        place(whole, AlignmentRequest(1))
    assert place(whole, AlignmentRequest(9, Policy.NONE))[8].nodes == ()


@st.composite
def situations(draw):
    """Draw a host and a request."""
    numbers = draw(
        st.lists(st.sampled_from([0, 1, 2, 8, 250]), min_size=1, unique=True)
    )
    cores = {node: draw(st.integers(1, 6)) for node in sorted(numbers)}
    node = st.sampled_from([*cores, UNKNOWN_NODE, 7])
    gpus = tuple(draw(st.lists(node, max_size=8)))
    nics = draw(st.integers(0, 4))
    request = AlignmentRequest(
        draw(st.integers(1, 10)),
        draw(st.sampled_from(Policy)),
        draw(st.sampled_from(Scope)),
    )
    return inventory(cores, gpus=gpus, nics=nics), request


@given(situations())
# A GPU on a node without cores is near none that has some.
@example((inventory({0: 1, 1: 1}, gpus=(7, 0)), AlignmentRequest(1, Policy.RESTRICTED)))
# The third rank has to split its cores, for a node with enough is not of the set.
@example(
    (
        inventory({0: 1, 1: 2, 2: 2, 8: 3}),
        AlignmentRequest(3, Policy.RESTRICTED, Scope.JOB),
    )
)
def test_placements_keep_within_the_host_and_their_policies(situation):
    whole, request = situation
    try:
        places = place(whole, request)
    except PlacementError:
        assert request.policy in STRICT
        return
    assert places == place(whole, request)
    assert [each.rank for each in places] == list(range(request.num_ranks))
    own = [core for each in places if each.share.has_enough for core in each.cores]
    assert len(own) == len(set(own))
    assert set(own) <= set(whole.cores)
    is_strict = request.policy in STRICT
    for each in places:
        assert [len(each.cores)] == [len(each.share.cores)]
        assert not (is_strict and not each.is_preferred)
        assert each.is_preferred != bool(each.reasons)
        nodes = {whole.gpus[gpu].node for gpu in each.gpus}
        aligned = places if request.scope is Scope.JOB else [each]
        near = {whole.gpus[gpu].node for other in aligned for gpu in other.gpus}
        if is_strict and each.nodes and UNKNOWN_NODE not in near:
            assert nodes <= set(each.nodes)
        if is_strict and each.nodes:
            assert {core.node for core in each.cores} <= set(each.nodes)
        if request.policy is Policy.SINGLE_NUMA_NODE and each.share.has_enough:
            assert len({core.node for core in each.cores}) <= 1
            assert len(each.nodes) <= 1


def test_cores_that_the_kernel_does_not_place_are_given_out_too():
    machine = Machine((Core((0,), UNKNOWN_NODE), Core((1,), 0)), 0.0, (), {})
    first, second = bind(machine, 2, BindMode.CORE, [None, None])
    assert (first.cpus, second.cpus) == ((0,), (1,))
