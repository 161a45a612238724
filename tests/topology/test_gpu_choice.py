"""Which GPUs ranks get: those of their numbers, or so many as fit the rest."""

import pytest
from tests.topology.supplies import homes, supply

from ronde.topology.placement.placing import place
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.refusals import PlacementError
from ronde.topology.placement.request import Request, Scope

ALTERNATING = supply({0: 4, 1: 4}, gpus=(0, 1, 0, 1))
FAR_FROM_THE_FIRST = supply({0: 4, 1: 4}, gpus=(0, 1), nics=(1,))


def gpus_of(whole, request):
    return [each.gpus for each in place(whole, request)]


@pytest.mark.parametrize("policy", [Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
def test_gpus_that_are_asked_for_are_chosen_on_one_node(policy):
    request = Request(2, policy, num_gpus=2)
    places = place(ALTERNATING, request)
    assert [each.gpus for each in places] == [(0, 2), (1, 3)]
    assert [each.nodes for each in places] == [(0,), (1,)]
    assert homes(places) == [{0}, {1}]
    (alone,) = place(ALTERNATING, request._replace(num_ranks=1))
    assert (alone.gpus, homes((alone,))) == ((0, 2), [{0}])


def test_gpus_are_chosen_where_the_adapter_is():
    request = Request(1, Policy.RESTRICTED, num_gpus=1, num_nics=1)
    (chosen,) = place(FAR_FROM_THE_FIRST, request)
    assert (chosen.gpus, chosen.nics, chosen.nodes) == ((1,), (0,), (1,))
    with pytest.raises(PlacementError, match="gpu: GPU 0 only on node 0; nic: 1"):
        place(FAR_FROM_THE_FIRST, request._replace(num_gpus=None))


def test_gpus_are_chosen_where_cores_are_left():
    whole = supply({0: 2, 1: 8}, gpus=(0, 0, 1, 1))
    request = Request(2, Policy.RESTRICTED, num_gpus=1, num_cores=2)
    assert gpus_of(whole, request) == [(0,), (2,)]
    assert gpus_of(whole, request._replace(num_cores=4)) == [(2,), (3,)]


def test_without_a_number_or_a_policy_they_are_counted_off():
    for request in (Request(4, Policy.RESTRICTED), Request(4, Policy.NONE, num_gpus=1)):
        assert gpus_of(ALTERNATING, request) == [(n,) for n in range(4)]


def test_fixed_gpus_of_two_nodes_are_not_aligned_where_one_has_as_many():
    request = Request(2, Policy.RESTRICTED, Scope.JOB, num_cores=1)
    with pytest.raises(PlacementError, match="gpu: GPUs 0, 1 not on fewer than nodes"):
        place(ALTERNATING, request)
    assert gpus_of(ALTERNATING, request._replace(num_gpus=1)) == [(0,), (2,)]


def test_a_job_on_two_nodes_leaves_each_rank_its_gpus_on_one():
    request = Request(2, Policy.RESTRICTED, Scope.JOB, num_gpus=2)
    assert gpus_of(ALTERNATING, request) == [(0, 2), (1, 3)]


def test_gpus_that_others_scattered_are_no_alignment():
    whole = supply({0: 4, 1: 4}, gpus=(0, 0, 0, 1, 1, 1))
    request = Request(3, num_gpus=2, num_cores=2)
    places = place(whole, request)
    assert [each.gpus for each in places] == [(0, 1), (3, 4), (2, 5)]
    assert [each.is_preferred for each in places] == [True, True, False]
    with pytest.raises(PlacementError) as refused:
        place(whole, request._replace(policy=Policy.RESTRICTED))
    assert refused.value.ranks == (2,)
    assert refused.value.reasons == (
        (
            "gpu: 2 GPUs not on fewer than nodes 0+1 together "
            "(free: 1 on node 0, 1 on node 1)"
        ),
    )
