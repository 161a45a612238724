"""Ranks are placed within what there is, aligned or refused."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, strategies as st
from tests.topology.saved_trees import NAMES, unpack
from tests.topology.supplies import homes, supply

from ronde.errors import UsageError
from ronde.launch.placement.placement import BindMode, bind
from ronde.topology.machine import UNKNOWN_NODE, Core, Machine
from ronde.topology.placement.placing import place
from ronde.topology.placement.plan import plan_host
from ronde.topology.placement.policies import Policy
from ronde.topology.placement.refusals import PlacementError
from ronde.topology.placement.request import Request, Scope
from ronde.topology.placement.supply import Nearness
from ronde.topology.probes.sysfs_tree import read_host
from ronde.topology.sysfs import read_machine

GIB = 1 << 30


TWO_SOCKETS = supply(
    {0: 16, 1: 16}, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nics=(0, 0, 0, 0, 1, 1, 1, 1)
)


@pytest.mark.parametrize("policy", Policy)
def test_ranks_have_the_cores_of_their_gpus_node_and_nobody_elses(policy):
    places = place(TWO_SOCKETS, Request(8, policy))
    assert homes(places) == [{0}] * 4 + [{1}] * 4
    assert [each.gpus for each in places] == [(n,) for n in range(8)]
    assert [len(each.cores) for each in places] == [4] * 8
    assert len({cpu for each in places for cpu in each.cpus}) == 64
    assert all(each.is_preferred for each in places)


def test_the_gpus_of_a_rank_follow_each_other():
    places = place(TWO_SOCKETS, Request(2, Policy.RESTRICTED, num_gpus=4))
    assert [each.gpus for each in places] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert homes(places) == [{0}, {1}]


def test_gpus_of_two_nodes_are_aligned_on_both_and_on_one_not():
    whole = supply({0: 4, 1: 4}, gpus=(0, 1))
    (both,) = place(whole, Request(1, Policy.RESTRICTED, num_gpus=2))
    assert (both.nodes, both.is_preferred) == ((0, 1), True)
    with pytest.raises(PlacementError) as refused:
        place(whole, Request(1, Policy.SINGLE_NUMA_NODE, num_gpus=2))
    assert refused.value.ranks == (0,)
    assert refused.value.reasons == (
        (
            "gpu: 2 GPUs not on fewer than nodes 0+1 together "
            "(free: 1 on node 0, 1 on node 1)"
        ),
    )


def test_who_finds_no_room_near_its_gpu_is_refused_by_name_and_started_at_best_effort():
    whole = supply({0: 8, 1: 8}, gpus=(0, 0, 0, 1))
    with pytest.raises(PlacementError) as refused:
        place(whole, Request(4, Policy.RESTRICTED, num_cores=4))
    assert str(refused.value) == (
        "policy must be one that every rank can keep, got restricted and rank 2 on n1: "
        "gpu: GPU 2 only on node 0; cpu: 4 cores only on node 1. Ask for less a rank, "
        "or take best-effort."
    )
    places = place(whole, Request(4, num_cores=4))
    assert [each.is_preferred for each in places] == [True, True, False, True]
    assert homes(places)[2] == {1}
    assert sum(len(each.cores) for each in places) == 16


def test_free_cores_that_are_scattered_are_no_alignment():
    whole = supply({0: 3, 1: 3})
    places = place(whole, Request(3, num_cores=2))
    assert [each.is_preferred for each in places] == [True, True, False]
    assert places[2].nodes == (0, 1)
    with pytest.raises(PlacementError, match="rank 2 on n1: cpu: 2 cores not on"):
        place(whole, Request(3, Policy.RESTRICTED, num_cores=2))


def test_a_strict_policy_looks_for_room_where_even_blocks_would_be_torn():
    whole = supply({0: 3, 1: 4})
    assert homes(place(whole, Request(2))) == [{0, 1}, {1}]
    assert homes(place(whole, Request(2, Policy.RESTRICTED))) == [{1}, {0}]
    assert [each.is_preferred for each in place(whole, Request(2))] == [False, True]


def test_more_cores_than_a_node_has_are_aligned_on_two_and_on_one_refused():
    whole = supply({0: 4, 1: 4, 5: 4, 9: 4})
    first, second = place(whole, Request(2, Policy.RESTRICTED, num_cores=8))
    assert (first.nodes, first.is_preferred) == ((0, 1), True)
    assert second.nodes == (5, 9)
    with pytest.raises(PlacementError, match="rank 0 on n1: cpu: 8 cores not on fewer"):
        place(whole, Request(2, Policy.SINGLE_NUMA_NODE, num_cores=8))


def test_nodes_near_each_other_are_taken_only_when_asked():
    far = ((10, 30, 11, 30), (30, 10, 30, 11), (11, 30, 10, 30), (30, 11, 30, 10))
    whole = supply(dict.fromkeys(range(4), 4))._replace(distances=far)
    request = Request(1, Policy.RESTRICTED, num_cores=8)
    assert place(whole, request)[0].nodes == (0, 1)
    assert place(whole, request._replace(is_closest=True))[0].nodes == (0, 2)


def test_a_gpu_that_nobody_places_has_no_preference():
    whole = supply({0: 2, 1: 2}, gpus=(UNKNOWN_NODE, 1))
    places = place(whole, Request(2, Policy.SINGLE_NUMA_NODE))
    assert homes(places) == [{0}, {1}]


def test_a_gpu_near_cores_that_may_not_be_used_is_told_of():
    whole = supply({0: 4}, gpus=(1,))
    (best,) = place(whole, Request(1))
    assert best.reasons == ("gpu: GPU 0 near no node whose cores may be used",)
    with pytest.raises(PlacementError, match="GPU 0 near no node"):
        place(whole, Request(1, Policy.RESTRICTED))


def test_fewer_cores_than_ranks_are_shared_by_all():
    places = place(supply({0: 2}), Request(3, Policy.RESTRICTED))
    assert [each.cpus for each in places] == [(0, 1, 2, 3)] * 3
    assert not any(each.has_enough for each in places)


def test_adapters_are_aligned_when_asked_for_and_else_only_near():
    whole = supply({0: 2, 1: 2}, gpus=(0, 1), nics=(0, 0))
    assert all(each.is_preferred for each in place(whole, Request(2)))
    with pytest.raises(PlacementError) as refused:
        place(whole, Request(2, Policy.RESTRICTED, num_nics=1))
    assert refused.value.ranks == (1,)
    assert refused.value.reasons == (
        "gpu: GPU 1 only on node 1",
        "nic: 1 adapter only on node 0",
        "cpu: 2 cores only on node 1",
    )


def test_of_adapters_class_counts_first_then_bandwidth_then_how_often():
    near = {
        (gpu, nic): Nearness((kind, -rate))
        for gpu in range(4)
        for nic, (kind, rate) in enumerate([(8, 48), (4, 12), (4, 24), (4, 24)])
    }
    whole = supply({0: 4}, gpus=(0,) * 4, nics=(0,) * 4, near=near)
    assert [each.nics for each in place(whole, Request(4))] == [(2,), (3,), (2,), (3,)]
    alone = place(whole, Request(4, num_nics=1))
    assert [each.nics for each in alone] == [(2,), (3,), (1,), (0,)]
    pairs = place(whole, Request(2, num_nics=2))
    assert [each.nics for each in pairs] == [(2, 3), (1, 0)]


def test_fewer_adapters_than_ranks_are_shared_evenly():
    places = place(
        supply({0: 4, 1: 4}, gpus=(0, 0, 0, 0, 1, 1, 1, 1), nics=(0, 1, 0, 1)),
        Request(8, Policy.RESTRICTED, num_nics=1),
    )
    assert [each.nics for each in places] == [(0,), (2,)] * 2 + [(1,), (3,)] * 2


def test_memory_of_several_nodes_serves_only_who_has_the_same_set():
    whole = supply({0: 4, 1: 4, 2: 4}, free_bytes=4 * GIB)
    request = Request(2, num_cores=1, memory_bytes=6 * GIB)
    # Node 2 has 4 GiB and node 1 has 2 GiB left, which is enough, but node 1 is in use
    # by rank 0 together with node 0.
    first, second = place(whole, request)
    assert first.memory_nodes == (0, 1)
    (reason,) = second.reasons
    assert reason.startswith("memory: 6GiB not free on nodes that no other rank has")
    assert reason.endswith("(free: 0B on node 0, 2GiB on node 1, 4GiB on node 2)")
    small = place(whole, Request(3, num_cores=1, memory_bytes=3 * GIB))
    assert [each.memory_nodes for each in small] == [(0,), (1,), (2,)]
    assert [homes([each])[0] for each in small] == [{0}, {1}, {2}]


def test_a_job_is_aligned_as_one():
    request = Request(4, Policy.RESTRICTED, Scope.JOB, num_gpus=1, num_cores=2)
    whole = supply({0: 4, 1: 4}, gpus=(0, 0, 1, 1))
    places = place(whole, request)
    assert {each.nodes for each in places} == {(0, 1)}
    assert homes(places) == [{0}, {0}, {1}, {1}]
    uneven = supply({0: 4, 1: 16}, gpus=(0, 0, 0, 1))
    with pytest.raises(PlacementError) as refused:
        place(uneven, request._replace(num_cores=4))
    assert "restricted and ranks 0-3 on n1 together: gpu: 4 GPUs" in str(refused.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0), "num_ranks must be at least 1, got 0"),
        (Request(4, num_cores=9), "cores must be at most 32 in all, got 36"),
        (Request(9, num_gpus=1), "gpus must be at most 8 in all, got 9"),
        (Request(1, num_nics=9), "nics must be at most 8 in all, got 9"),
        (Request(1, memory_bytes=1), "memory must be asked of a source that tells"),
        (Request(1, max_numa_nodes=7), "max_numa_nodes must be 8 to 16, got 7"),
        (Request(1, max_numa_nodes=17), "max_numa_nodes must be 8 to 16, got 17"),
    ],
)
def test_what_is_not_there_is_refused_with_numbers(request_, message):
    with pytest.raises(UsageError, match=message):
        place(TWO_SOCKETS, request_)


def test_memory_that_is_not_free_is_refused_with_the_sum():
    whole = supply({0: 4}, free_bytes=4 * GIB)
    with pytest.raises(UsageError, match="got 6GiB of 4GiB"):
        place(whole, Request(2, memory_bytes=3 * GIB))


def test_many_nodes_are_too_many_unless_nothing_is_aligned():
    whole = supply(dict.fromkeys(range(9), 1))
    with pytest.raises(UsageError, match="must be at most 8, got 9: every set"):
        place(whole, Request(1))
    assert place(whole, Request(9, max_numa_nodes=9))[8].is_preferred
    assert place(whole, Request(9, Policy.NONE))[8].nodes == ()


@st.composite
def situations(draw):
    """Draw a host and a request that it has enough for."""
    numbers = draw(
        st.lists(st.sampled_from([0, 1, 2, 8, 250]), min_size=1, unique=True)
    )
    cores = {node: draw(st.integers(1, 6)) for node in sorted(numbers)}
    node = st.sampled_from([*cores, UNKNOWN_NODE, 7])
    gpus = tuple(draw(st.lists(node, max_size=8)))
    nics = tuple(draw(st.lists(node, max_size=4)))
    whole = supply(cores, gpus=gpus, nics=nics, free_bytes=GIB)
    num_ranks = draw(st.integers(1, 10))
    request = Request(
        num_ranks,
        draw(st.sampled_from(Policy)),
        draw(st.sampled_from(Scope)),
        num_cores=draw(st.integers(0, len(whole.cores) // num_ranks)),
        memory_bytes=draw(st.sampled_from([0, GIB * len(cores) // num_ranks])),
        num_gpus=draw(st.one_of(st.none(), st.integers(0, len(gpus) // num_ranks))),
        num_nics=draw(st.integers(0, len(nics))),
    )
    return whole, request


def is_every_gpu_placed(whole, request, places, one):
    """Whether the GPUs align a rank: one without a node, and none of them does."""
    aligned = places if request.scope is Scope.JOB else [one]
    taken = [whole.gpus[gpu] for each in aligned for gpu in each.gpus]
    # Those that are chosen are chosen among all.
    known = whole.gpus if request.num_gpus else taken
    return all(gpu.node != UNKNOWN_NODE for gpu in known)


RESTRICTED = Request(1, Policy.RESTRICTED, Scope.JOB, num_cores=2)


@given(situations())
# A GPU on a node without cores is near none that has some.
@example(
    (supply({0: 1, 1: 1}, gpus=(7, 0)), RESTRICTED._replace(num_cores=1, num_gpus=1))
)
# The third rank has to split its cores, for a node with enough is not of the set.
@example((supply({0: 1, 1: 2, 2: 2, 8: 3}), RESTRICTED._replace(num_ranks=3)))
def test_placements_keep_within_the_host_and_their_policies(situation):
    whole, request = situation
    try:
        places = place(whole, request)
    except PlacementError:
        assert request.policy in {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE}
        return
    assert places == place(whole, request)
    assert [each.rank for each in places] == list(range(request.num_ranks))
    own = [core for each in places if each.has_enough for core in each.cores]
    assert len(own) == len(set(own))
    assert set(own) <= set(whole.cores)
    if any(not each.has_enough for each in places):
        assert not request.num_cores
    if request.num_cores:
        assert {len(each.cores) for each in places} == {request.num_cores}
    strict = request.policy in {Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE}
    gpus = [gpu for each in places for gpu in each.gpus]
    assert len(gpus) == len(set(gpus))
    for each in places:
        assert request.num_gpus in {None, len(each.gpus)}
        if strict and each.nodes and is_every_gpu_placed(whole, request, places, each):
            nodes = {whole.gpus[gpu].node for gpu in each.gpus}
            assert nodes <= set(each.nodes)
        assert not (strict and not each.is_preferred)
        assert each.is_preferred != bool(each.reasons)
        assert len(set(each.nics)) == len(each.nics)
        if request.num_nics:
            assert len(each.nics) == request.num_nics
        if strict and each.nodes:
            assert {core.node for core in each.cores} <= set(each.nodes)
        if request.policy is Policy.SINGLE_NUMA_NODE:
            assert len({core.node for core in each.cores}) <= 1
            assert len(each.nodes) <= 1


@given(situations())
def test_adapters_are_shared_only_where_there_are_too_few(situation):
    whole, request = situation
    request = request._replace(policy=Policy.BEST_EFFORT)
    given_out = [nic for each in place(whole, request) for nic in each.nics]
    if 0 < request.num_nics * request.num_ranks <= len(whole.nics):
        assert len(set(given_out)) == len(given_out)


def test_eight_ranks_on_eight_nodes_are_placed_at_once():
    # Adapters are all on one node, so that most ranks cannot be aligned and all sets
    # of nodes have to be looked at.
    whole = supply(
        dict.fromkeys(range(8), 16), gpus=tuple(range(8)), nics=(0,) * 8, free_bytes=GIB
    )
    request = Request(8, num_cores=8, memory_bytes=GIB // 2, num_nics=1)
    took_s: list[float] = []
    for _ in range(3):
        start_s = time.process_time()
        places = place(whole, request)
        took_s.append(time.process_time() - start_s)
    assert [each.is_preferred for each in places] == [True] + [False] * 7
    assert min(took_s) < 0.3


@pytest.fixture(scope="module", params=NAMES)
def saved(request, tmp_path_factory):
    """Return a machine of other people: what its agent would tell, and its graph."""
    tree = unpack(request.param, tmp_path_factory.mktemp("tree"))
    return read_machine(tree), read_host(tree)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_real_machines_are_divided_within_the_cpus_that_are_allowed(saved, num_ranks):
    machine, host = saved
    allowed = {cpu for core in machine.cores for cpu in core.cpus}
    for mode in BindMode:
        for binding in bind(machine, num_ranks, mode, [None] * num_ranks):
            assert set(binding.cpus) <= allowed
    for policy in (Policy.NONE, Policy.BEST_EFFORT):
        plan = plan_host(host, Request(num_ranks, policy), machine.cores)
        taken = [set(rank.cpus) for rank in plan.ranks]
        assert all(taken)
        assert set().union(*taken) == allowed
        if len(machine.cores) >= num_ranks:
            assert sum(map(len, taken)) == len(allowed)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_on_real_machines_a_small_request_fits_one_node(saved, num_ranks):
    machine, host = saved
    if len(machine.cores) < num_ranks:
        pytest.skip(f"it has {len(machine.cores)} cores")
    request = Request(num_ranks, Policy.SINGLE_NUMA_NODE, num_cores=1, num_gpus=0)
    plan = plan_host(host, request, machine.cores)
    node_of = {cpu: core.node for core in machine.cores for cpu in core.cpus}
    for rank in plan.ranks:
        assert len({node_of[cpu] for cpu in rank.cpus}) == 1
    assert all(not set(a.cpus) & set(b.cpus) for a, b in pairwise(plan.ranks))


def test_cores_that_the_kernel_does_not_place_are_given_out_too():
    machine = Machine((Core((0,), UNKNOWN_NODE), Core((1,), 0)), 0.0, (), ())
    first, second = bind(machine, 2, BindMode.CORE, [None, None])
    assert (first.cpus, second.cpus) == ((0,), (1,))
