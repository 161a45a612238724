"""The model of ``ronde plan``: laws that every prediction must obey."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ronde.parallel import Layout
from ronde.plan import (
    PARTS,
    ArrivingGradient,
    Cluster,
    Exchange,
    Hypothesis,
    LinkFacts,
    Overlap,
    PhaseTimes,
    Point,
    Program,
    Setup,
    Size,
    StepModel,
    infer,
    load_priors,
    mean_of_largest,
)

_CLUSTER = Cluster(8, node_gbit_per_s=100.0, transport="rdma", gpu_link_gb_per_s=200.0)
_PROGRAM = Program("resnet50", num_parameters=25.6e6, overlap=Overlap.BUCKET)
_SETUP = Setup(_PROGRAM, _CLUSTER, (Point(Size(1, 1, 64.0), 250.0),))
_BLOCKS = replace(
    _PROGRAM, num_parameters=8e9, itemsize=2.0, num_blocks=32, hidden=4096, sequence=512
)
_SIZES = [Size(n, max(1, n // 8), 64.0) for n in (2, 4, 8, 16, 64, 512, 4096, 27_600)]


def _model(setup: Setup = _SETUP, **known: float) -> StepModel:
    """Return a model with one draw: the priors' middles, or known values."""
    draws = load_priors().values(np.zeros((1, len(load_priors().unknowns))))
    return StepModel(
        setup, Hypothesis(), draws | {k: np.array([v]) for k, v in known.items()}
    )


def _step_s(model: StepModel, size: Size) -> float:
    return float(model.at(size, np.array([0.25])).step_s[0])


@pytest.mark.parametrize("exchange", Exchange)
def test_one_rank_only_computes_and_updates(exchange: Exchange) -> None:
    setup = replace(_SETUP, program=replace(_PROGRAM, exchange=exchange))
    parts = _model(setup).at(Size(1, 1, 64.0), np.array([0.25])).parts_s
    assert {name for name in PARTS if parts[name][0] > 0} == {"compute", "fixed cost"}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(_SIZES),
    st.sampled_from(["alpha_rdma", "leak", "host", "growth", "update"]),
    st.floats(1.0, 30.0),
)
def test_steps_are_never_faster_with_a_larger_cost(
    size: Size, name: str, factor: float
) -> None:
    middle = load_priors().unknowns[name].middle
    dearer = min(1.0, middle * factor) if name == "leak" else middle * factor
    assert _step_s(_model(**{name: dearer}), size) >= _step_s(_model(), size)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(_SIZES), st.floats(1.0, 1000.0), st.sampled_from(Exchange))
def test_steps_are_never_faster_on_slower_links(
    size: Size, factor: float, exchange: Exchange
) -> None:
    setup = replace(_SETUP, program=replace(_PROGRAM, exchange=exchange))
    slower = replace(_CLUSTER, node_gbit_per_s=100.0 / factor)
    assert _step_s(_model(replace(setup, cluster=slower)), size) >= _step_s(
        _model(setup), size
    )


@pytest.mark.parametrize("size", _SIZES, ids=lambda size: str(size.num_ranks))
def test_parts_add_up_to_the_step_and_are_free_one_by_one(size: Size) -> None:
    model, compute = _model(), np.array([0.25])
    step = model.at(size, compute)
    assert sum(part[0] for part in step.parts_s.values()) == pytest.approx(
        step.step_s[0]
    )
    for name in PARTS[1:]:
        assert model.at(size, compute, free=name).step_s[0] <= step.step_s[0] + 1e-12


def test_computing_time_is_what_makes_the_step_as_long_as_measured() -> None:
    for points in (
        (Point(Size(1, 1, 64.0), 250.0),),
        (Point(Size(64, 8, 64.0), 9000.0),),
    ):
        model = _model(replace(_SETUP, points=points))
        size, speed = points[0]
        step_s = 64.0 * size.num_ranks / speed
        found = model.at(size, model.compute_s()).step_s
        assert found[0] == pytest.approx(step_s, rel=1e-6)


def test_gradients_that_are_known_are_walked() -> None:
    gradients = tuple(ArrivingGradient(1 << 20, 4, 0.01 * i) for i in range(1, 11))
    program = replace(
        _PROGRAM,
        num_parameters=10 << 20,
        algorithm="ring",
        gradients=gradients,
        bucket_cap_bytes=4 << 20,
        phases=PhaseTimes(0.05, 0.1, 0.01),
    )
    beta, n = 1e-9, 16
    link = LinkFacts(0.0, beta)
    cluster = Cluster(1, inside=link, between=link)
    base = (Point(Size(1, 1, 64.0), 400.0),)
    model = _model(
        Setup(program, cluster, base), interference=0.0, growth=0.0, host=0.0
    )
    # Ten buckets of 4 MiB, one every 10 ms, each of which takes less: only the last is
    # exposed.
    each_s = 2 * (n - 1) / n * (4 << 20) * beta
    step = model.at(Size(n, n, 64.0), np.array([0.15]))
    assert step.parts_s["bandwidth between"][0] == pytest.approx(each_s, rel=1e-3)
    late = replace(program, overlap=Overlap.NONE)
    step = _model(Setup(late, cluster, base)).at(Size(n, n, 64.0), np.array([0.15]))
    assert step.parts_s["bandwidth between"][0] == pytest.approx(10 * each_s, rel=1e-3)


def test_the_slowest_of_n_is_as_late_as_in_a_simulation() -> None:
    rng, sigma = np.random.default_rng(0), 0.05
    setup = replace(_SETUP, program=replace(_PROGRAM, jitter=sigma))
    for n in (2, 8, 64, 512):
        drawn = np.exp(sigma * rng.standard_normal((4000, n))).max(1)
        expected = np.exp(np.log(drawn).mean())
        size = Size(n, n, 64.0)
        parts = _model(setup).at(size, np.array([0.25])).parts_s
        others = sum(float(part[0]) for part in parts.values())
        waited = parts["stragglers"][0] / (others - parts["stragglers"][0])
        assert 1 + waited == pytest.approx(expected, rel=2e-3)
        assert mean_of_largest(n) == pytest.approx(
            np.log(drawn).mean() / sigma, abs=0.05
        )


def test_the_mean_of_the_largest_grows_with_every_rank() -> None:
    means = [mean_of_largest(n) for n in (*range(1, 40), 4096, 27_600)]
    assert means == sorted(means)
    assert means[-2:] == pytest.approx([3.63, 4.09], rel=0.01)


def test_predictions_have_a_middle_between_their_bounds_and_repeat() -> None:
    for size in _SIZES:
        first, second = (infer(_SETUP, load_priors()).predict(size) for _ in range(2))
        assert 0 < first.low < first.middle < first.high < np.inf
        assert first[:5] == second[:5]


def test_measured_sizes_narrow_an_interval_and_draw_it_to_them() -> None:
    alone = infer(_SETUP, load_priors()).predict(_SIZES[4])
    points = (*_SETUP.points, Point(Size(16, 2, 64.0), 16 * 200.0))
    known = infer(replace(_SETUP, points=points), load_priors()).predict(_SIZES[4])
    assert known.high / known.low < alone.high / alone.low
    assert known.middle < alone.middle  # 16 ranks are slower than expected
    assert known.middle == pytest.approx(64 * 200.0, rel=0.05)


def test_many_draws_agree_with_several_speeds() -> None:
    """Also where hardly anything but the speeds is known."""
    speeds = {1: 253.1, 4: 925.0, 8: 1282.0}
    points = [Point(Size(n, -(-n // 4)), speed) for n, speed in speeds.items()]
    posterior = infer(Setup(Program(), Cluster(4), tuple(points)), load_priors())
    assert posterior.effective_draws > 100
    for low, middle, high, _ in posterior.parameters().values():
        assert low < middle < high
    assert posterior.contradiction == pytest.approx(1, abs=0.01)


def test_a_change_of_nothing_changes_nothing() -> None:
    posterior = infer(_SETUP, load_priors())
    same = replace(_SETUP, program=replace(_PROGRAM, compression=1.0))
    before, after = posterior.predict(_SIZES[4]), posterior.predict(_SIZES[4], same)
    assert posterior.ratio(after, before) == (1.0, 1.0, 1.0)


def test_a_device_twice_as_fast_doubles_the_speed_of_one_rank_at_most() -> None:
    posterior = infer(_SETUP, load_priors())
    fast = replace(_SETUP, program=replace(_PROGRAM, compute_speed=2.0))
    for size in (Size(1, 1, 64.0), *_SIZES):
        ratio = posterior.ratio(posterior.predict(size, fast), posterior.predict(size))
        assert 1.0 < ratio[1] <= 2.0


def _parts(mesh: Layout, size: Size, **facts: int) -> dict[str, float]:
    """Return the parts of a step of a model of blocks; a copy computes 40 s."""
    program = replace(_BLOCKS, mesh=mesh, **facts)
    model = _model(replace(_SETUP, program=program))
    parts = model.at(size, np.array([40.0])).parts_s
    return {name: float(part[0]) for name, part in parts.items()}


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["hidden", "num_blocks"]),
    st.integers(1, 9),
)
def test_steps_are_never_faster_with_larger_or_more_blocks(
    tp: int, pp: int, name: str, factor: int
) -> None:
    mesh, size = Layout(tp=tp, pp=pp), Size(256, 32, 64.0)
    known = {"microbatches": 8}
    whole = sum(_parts(mesh, size, **known).values())
    larger = known | {name: factor * getattr(_BLOCKS, name)}
    assert sum(_parts(mesh, size, **larger).values()) >= whole


@pytest.mark.parametrize("exchange", [Exchange.ALL_REDUCE, Exchange.SHARD_ALL])
def test_a_mesh_of_data_parallelism_changes_nothing(exchange: Exchange) -> None:
    program = replace(_PROGRAM, exchange=exchange)
    axis = "dp_shard" if exchange.zero else "dp_replicate"
    for size in (Size(1, 1, 64.0), *_SIZES):
        steps = [
            _step_s(_model(replace(_SETUP, program=replace(program, mesh=mesh))), size)
            for mesh in (Layout(), Layout(**{axis: -1}), Layout(**{axis: 2}))
        ]
        assert steps[1:] == steps[:1] * 2


def test_ranks_of_a_copy_share_its_arithmetic_and_its_speed_is_found_again() -> None:
    size = Size(64, 8, 64.0)
    for mesh in (Layout(tp=8), Layout(pp=4), Layout(tp=2, pp=32)):
        program = replace(_BLOCKS, mesh=mesh, microbatches=16)
        points = (Point(size, 10.0),)
        model = _model(Setup(program, _CLUSTER, points))
        step_s = model.setup.units(size) / 10.0
        compute_s = model.compute_s()
        step = model.at(size, compute_s)
        assert step.step_s[0] == pytest.approx(step_s, rel=1e-6)
        ranks = mesh.tp * mesh.pp
        assert ranks * step.parts_s["compute"][0] == pytest.approx(compute_s[0])
        assert model.setup.units(size) == 64 / ranks * 64


def test_a_bubble_is_of_pipelines_and_vanishes_with_many_microbatches() -> None:
    size = Size(64, 8, 4096.0)
    assert _parts(Layout(tp=8), size, microbatches=4)["bubble"] == 0
    few, chunked, many = (
        _parts(Layout(pp=4), size, microbatches=m, chunks=v)
        for m, v in ((4, 1), (4, 2), (4096, 1))
    )
    messages = _parts(Layout(pp=4), size, microbatches=4, hidden=0)
    busy_s = messages["compute"] + messages["host"]
    assert messages["bubble"] == pytest.approx(3 / 4 * busy_s, rel=1e-3)
    assert few["bubble"] > 1.9 * chunked["bubble"]
    assert many["bubble"] < 1e-3 * many["compute"]


@pytest.mark.parametrize(
    ("mesh", "crossing"),
    [
        # Bytes through a node's adapters, relative to all gradients.
        (Layout(), 2 * 63 / 64),
        (Layout(tp=2), 2 * (2 * 31 / 32) / 2),
        (Layout(tp=8), 8 * (2 * 7 / 8) / 8),
        (Layout(pp=8), 0),
        (Layout(dp_shard=8, dp_replicate=-1), 8 * (2 * 7 / 8) / 8),
    ],
    ids=str,
)
def test_gradients_cross_nodes_by_volume(mesh: Layout, crossing: float) -> None:
    exchange = Exchange.SHARD_GRADIENTS if mesh.dp_shard > 1 else Exchange.ALL_REDUCE
    program = replace(_BLOCKS, mesh=mesh, exchange=exchange, overlap=Overlap.NONE)
    program = replace(program, algorithm="ring", hidden=0, microbatches=64)
    beta = 1e-9
    # Inside is free, so that all time of bytes is that between nodes.
    cluster = Cluster(8, inside=LinkFacts(0.0, 0.0), between=LinkFacts(0.0, beta))
    model = _model(replace(_SETUP, program=program, cluster=cluster))
    parts = model.at(Size(64, 8, 64.0), np.array([40.0])).parts_s
    assert parts["bandwidth between"][0] == pytest.approx(
        crossing * 16e9 * beta, rel=1e-3, abs=1e-6
    )


def test_a_period_divides_an_exchange_that_nothing_hides() -> None:
    size, whole = Size(64, 8, 64.0), replace(_PROGRAM, overlap=Overlap.NONE)
    each = [
        _model(replace(_SETUP, program=replace(whole, period=period)))
        .at(size, np.array([0.25]))
        .parts_s
        for period in (1.0, 4.0)
    ]
    for name in ("bandwidth between", "latency"):
        assert each[1][name] == pytest.approx(each[0][name] / 4)
    hidden = _model(replace(_SETUP, program=replace(_PROGRAM, period=4.0)))
    assert hidden.at(size, np.array([0.25])).parts_s["latency"] == pytest.approx(
        each[1]["latency"]
    )
