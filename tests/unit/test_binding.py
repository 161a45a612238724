"""What of its host each rank gets."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from ronde.errors import UsageError
from ronde.topology import (
    UNKNOWN_NODE,
    BindMode,
    Core,
    Gpu,
    GpuView,
    Machine,
    PlacementError,
    PlacementRequest,
    Policy,
    RankResources,
    assign_gpus,
    bind,
    choose_gpus,
    place_ranks,
)


def gpu(index: int, node: int = 0) -> Gpu:
    return Gpu(
        bus_id=f"0000:{index:02x}:00.0",
        node=node,
        name="H100",
        maker="nvidia",
        uuid=f"GPU-{index}f-aa",
        visible_as=str(index),
    )


def machine(by_node: dict[int, int], *, threads: int = 1, limit: float = 0.0, gpus=()):
    """Return one with so many cores a node, siblings numbered as Linux does."""
    nodes = [node for node, count in sorted(by_node.items()) for _ in range(count)]
    cores = tuple(
        Core(tuple(n + len(nodes) * t for t in range(threads)), node)
        for n, node in enumerate(nodes)
    )
    return Machine(cores, limit, tuple(gpus), {})


@st.composite
def situations(draw):
    """Draw a machine, a number of ranks, a mode and each rank's GPU."""
    ids = st.sampled_from([UNKNOWN_NODE, 0, 1, 8, 250])
    by_node = draw(st.dictionaries(ids, st.integers(1, 9), min_size=1, max_size=4))
    limit = draw(st.sampled_from([0.0, 0.5, 2.0, 7.5, 100.0]))
    whole = machine(by_node, threads=draw(st.integers(1, 3)), limit=limit)
    num_ranks = draw(st.integers(1, 12))
    near = st.one_of(st.none(), ids.map(lambda node: gpu(0, node)))
    gpus = draw(
        st.one_of(
            st.just([None] * num_ranks),
            st.lists(near, min_size=num_ranks, max_size=num_ranks),
        )
    )
    return whole, num_ranks, draw(st.sampled_from(BindMode)), gpus


def cores_of(binding: RankResources, whole: Machine) -> list[Core]:
    return [core for core in whole.cores if set(core.cpus) & set(binding.cpus)]


@given(situations())
def test_every_rank_is_bound_within_the_machine_and_always_alike(situation):
    whole, num_ranks, mode, gpus = situation
    bindings = bind(whole, num_ranks, mode, gpus)
    assert len(bindings) == num_ranks
    assert bindings == bind(whole, num_ranks, mode, list(gpus))
    for binding in bindings:
        cores = cores_of(binding, whole)
        threads = sorted(cpu for core in cores for cpu in core.cpus)
        assert list(binding.cpus) == threads, "siblings stay together"
        nodes = {core.node for core in cores}
        assert binding.memory_node == UNKNOWN_NODE or nodes == {binding.memory_node}
        assert binding.why
        assert bool(binding.cpus) != binding.why.startswith("not bound")


@given(situations())
def test_no_more_threads_are_promised_than_there_are_cores(situation):
    whole, num_ranks, mode, gpus = situation
    counts = [b.num_cores for b in bind(whole, num_ranks, mode, gpus)]
    assert min(counts) >= 1
    assert sum(counts) <= max(len(whole.cores), num_ranks)
    if whole.cpu_limit:
        assert sum(counts) <= max(whole.cpu_limit, num_ranks)


@given(situations())
def test_cores_of_its_own_means_nobody_elses(situation):
    whole, num_ranks, _, gpus = situation
    bindings = bind(whole, num_ranks, BindMode.CORE, gpus)
    taken = [set(b.cpus) for b in bindings if b.has_enough]
    assert sum(map(len, taken)) == len(set().union(*taken))
    for binding in bindings:
        if not binding.has_enough:
            sharing = [b for b in bindings if b.cpus == binding.cpus]
            assert len(sharing) > len(cores_of(binding, whole))


@given(situations())
def test_without_gpus_the_blocks_are_even_contiguous_and_complete(situation):
    whole, num_ranks, _, _ = situation
    bindings = bind(whole, num_ranks, BindMode.CORE, [None] * num_ranks)
    blocks = [cores_of(binding, whole) for binding in bindings]
    if len(whole.cores) < num_ranks:
        assert all(block == list(whole.cores) for block in blocks)
        return
    assert [core for block in blocks for core in block] == list(whole.cores)
    sizes = [len(block) for block in blocks]
    assert all(0 <= low - high <= 1 for low, high in pairwise(sizes))
    assert sizes[0] - sizes[-1] <= 1


@given(situations())
def test_what_is_near_a_gpu_is_divided_among_its_ranks(situation):
    whole, num_ranks, _, gpus = situation
    nodes = {core.node for core in whole.cores} - {UNKNOWN_NODE}
    if not all(each and each.node in nodes for each in gpus):
        return
    for binding, each in zip(
        bind(whole, num_ranks, BindMode.CORE, gpus), gpus, strict=True
    ):
        assert {core.node for core in cores_of(binding, whole)} == {each.node}


@given(situations())
def test_auto_crowds_nobody_leaves_no_core_unused_and_a_quota_alone(situation):
    whole, num_ranks, _, gpus = situation
    bindings = bind(whole, num_ranks, BindMode.AUTO, gpus)
    assert all(binding.has_enough for binding in bindings)
    given_out = {cpu for binding in bindings for cpu in binding.cpus}
    assert given_out in (set(), {cpu for core in whole.cores for cpu in core.cpus})
    if 0 < whole.cpu_limit < len(whole.cores):
        assert not given_out


def test_auto_binds_ranks_near_their_gpus_where_every_node_has_some():
    whole = machine({0: 2, 1: 2})
    near = bind(whole, 2, BindMode.AUTO, [gpu(0, 1), gpu(1, 0)])
    assert [b.cpus for b in near] == [(2, 3), (0, 1)]
    (alone,) = bind(whole, 1, BindMode.AUTO, [gpu(0, 1)])
    assert alone.cpus == ()
    (asked,) = bind(whole, 1, BindMode.CORE, [gpu(0, 1)])
    assert asked.cpus == (2, 3)


def test_ranks_near_one_node_have_all_of_it_with_numa():
    whole = machine({0: 4, 1: 4})
    near = [gpu(0, 1), gpu(1, 1), gpu(2, 0), gpu(3, 0)]
    bindings = bind(whole, 4, BindMode.NUMA, near)
    assert [b.cpus for b in bindings] == [(4, 5, 6, 7)] * 2 + [(0, 1, 2, 3)] * 2
    assert [b.memory_node for b in bindings] == [1, 1, 0, 0]
    assert {b.num_cores for b in bindings} == {2}


def test_three_ranks_without_gpus_spread_over_two_nodes():
    bindings = bind(machine({0: 4, 8: 2}), 3, BindMode.NUMA, [None] * 3)
    assert [b.memory_node for b in bindings] == [0, 0, 8]
    assert [b.num_cores for b in bindings] == [2, 2, 2]


def test_one_memory_node_is_no_reason_to_bind_but_cores_are():
    whole = machine({0: 4}, gpus=[gpu(0)])
    for mode in (BindMode.NUMA, BindMode.AUTO):
        (binding,) = bind(whole, 1, mode, [gpu(0)])
        assert binding.cpus == ()
    first, _ = bind(whole, 2, BindMode.AUTO, [None, None])
    assert first.cpus == (0, 1)
    assert first.memory_node == UNKNOWN_NODE, "there is no other to prefer it to"


def test_a_gpu_that_the_kernel_does_not_place_binds_nobody_by_itself():
    whole = machine({0: 2, 1: 2})
    unplaced = [gpu(0, 0), gpu(1, UNKNOWN_NODE)]
    assert not any(b.cpus for b in bind(whole, 2, BindMode.AUTO, unplaced))
    asked = bind(whole, 2, BindMode.CORE, unplaced)
    assert [b.cpus for b in asked] == [(0, 1), (2, 3)]


def test_fewer_cores_than_ranks_are_shared_and_told_of():
    places, notices = place_ranks(
        machine({0: 2}), "n1", 3, PlacementRequest(BindMode.CORE, GpuView.ALL), {}
    )
    assert [place.cpus for place in places] == [(0, 1)] * 3
    assert notices == ("n1: 3 ranks share 2 cores.",)


def test_a_quota_caps_the_threads_of_who_asked_to_be_bound():
    first, second = bind(machine({0: 8}, limit=2.5), 2, BindMode.CORE, [None] * 2)
    assert first.cpus == (0, 1, 2, 3)
    assert (first.num_cores, second.num_cores) == (1, 1)


def test_the_reason_tells_what_is_divided_among_how_many():
    whole = machine({0: 4, 1: 4})
    near = bind(whole, 2, BindMode.CORE, [gpu(0, 1), gpu(1, 1)])
    assert [b.why for b in near] == ["1/2 of 4 cores near GPU"] * 2
    alone, _ = bind(whole, 2, BindMode.NUMA, [None, None])
    assert alone.why == "memory node near 1/2 of 8 cores"


def test_a_refusal_names_host_rank_and_resource():
    whole = machine({0: 4, 1: 4}, gpus=[gpu(0, 0), gpu(1, 7)])
    request = PlacementRequest(BindMode.AUTO, GpuView.ALL, Policy.RESTRICTED)
    with pytest.raises(PlacementError) as refused:
        place_ranks(whole, "n1", 2, request, {})
    assert "policy restricted refuses rank 1 on n1: gpu: GPU 1 near no node" in str(
        refused.value
    )
    relaxed = PlacementRequest(BindMode.AUTO, GpuView.ALL)
    assert len(place_ranks(whole, "n1", 2, relaxed, {})[0]) == 2


def test_best_effort_does_not_mind_how_many_memory_nodes_there_are():
    whole = machine(dict.fromkeys(range(64), 1))
    bindings = bind(whole, 64, BindMode.NUMA, [None] * 64)
    assert [binding.memory_node for binding in bindings] == list(range(64))
    with pytest.raises(
        UsageError, match="at most 16 memory nodes with cores, but the host has 64"
    ):
        bind(whole, 64, BindMode.CORE, [None] * 64, policy=Policy.RESTRICTED)


def test_a_rank_that_sees_one_sees_its_own_by_the_number_the_bus_gives_it():
    devices = assign_gpus([gpu(5), gpu(3)], 2, GpuView.ONE, is_choice=False, host="n1")
    assert [env for _, env in devices] == [
        {"CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ]


@pytest.mark.parametrize("gpus", [[], [gpu(0)]])
def test_one_gpu_each_needs_as_many_as_ranks(gpus):
    with pytest.raises(
        UsageError, match=rf"n1 has 2 ranks and {len(gpus)} GPUs\. Start"
    ):
        assign_gpus(gpus, 2, GpuView.ONE, is_choice=False, host="n1")


def test_more_ranks_than_gpus_share_or_use_none_and_are_told():
    whole = machine({0: 4, 1: 4}, gpus=[gpu(0, 1)])
    request = PlacementRequest(BindMode.AUTO, GpuView.ALL)
    places, notices = place_ranks(whole, "n1", 2, request, {})
    assert [place.device for place in places] == ["", ""]
    assert [place.cpus for place in places] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert notices[0].startswith("n1: 2 ranks and fewer GPUs, 1, so that")


def test_the_host_files_gpus_are_counted_among_those_the_host_lets_be_used():
    inherited = [gpu(4), gpu(5), gpu(6), gpu(7)]
    assert choose_gpus(inherited, ["2", "0"], "f line 1") == (gpu(6), gpu(4))
    assert choose_gpus(inherited, [], "") == tuple(inherited)
    (by_id,) = choose_gpus(inherited, ["GPU-5f"], "f line 1")
    assert (by_id.bus_id, by_id.visible_as) == ("0000:05:00.0", "GPU-5f")
    for wrong in (["4"], ["0", "0"], ["-1"], ["GPU-9"]):
        with pytest.raises(UsageError, match=r"got '.*' \(f line 1\)\."):
            choose_gpus(inherited, wrong, "f line 1")


def test_a_choice_of_gpus_is_told_to_every_rank():
    whole = machine({0: 4}, gpus=[gpu(n) for n in range(4)])
    request = PlacementRequest(BindMode.NONE, GpuView.ALL)
    chosen = request._replace(gpus=("3", "1"))
    places, _ = place_ranks(whole, "n1", 2, chosen, {})
    assert [place.device for place in places] == ["GPU 3 H100", "GPU 1 H100"]
    assert {place.env["CUDA_VISIBLE_DEVICES"] for place in places} == {"3,1"}
    environ = {"CUDA_VISIBLE_DEVICES": "2,0"}
    hidden, _ = place_ranks(whole, "n1", 2, request, environ)
    assert [place.device for place in hidden] == ["GPU 2 H100", "GPU 0 H100"]
    assert hidden[0].env == {}, "who hid them told the ranks already"
