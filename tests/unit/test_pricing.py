"""Prices of collectives against closed forms, laws, and fits of synthetic times."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.limits import HANG_S

from ronde.collectives import (
    ALGORITHMS,
    ALL_REDUCES,
    LinkCost,
    LinkCosts,
    all_reduce_s,
    fit_link,
    price,
)
from ronde.errors import UsageError
from ronde.topology import RankLayout

INSIDE = LinkCost(2e-6, 1 / 100e9, 1 / 50e9)
BETWEEN = LinkCost(10e-6, 1 / 1e9, 1 / 50e9)
COSTS = LinkCosts(INSIDE, BETWEEN)
FREE = LinkCost(0.0, 0.0)
ONLY_BYTES = LinkCosts(FREE, LinkCost(0.0, 1.0))
ONLY_MESSAGES = LinkCosts(FREE, LinkCost(1.0, 0.0))


def flat(n: int) -> RankLayout:
    return RankLayout(n, n, 1)


def nodes(num_nodes: int, g: int) -> RankLayout:
    return RankLayout(num_nodes * g, num_nodes, g)


LAYOUTS = st.builds(nodes, st.integers(1, 12), st.integers(1, 8))
SIZES = st.integers(0, 1 << 28)
PIECES = st.sampled_from([0, 1 << 16, 2 << 20])
NAMES = st.sampled_from(ALL_REDUCES)


def test_closed_forms_of_the_ring():
    alpha, beta, gamma = BETWEEN
    n, size = 8, 800_000
    seconds = all_reduce_s("ring", size, flat(n), COSTS)
    share = size / n
    expected = 2 * (n - 1) * (alpha + share * beta) + (n - 1) * share * gamma
    assert seconds == pytest.approx(expected)
    # The rounds of a ring over nodes are as slow as those between nodes, and pieces
    # save nothing.
    assert all_reduce_s("ring", size, nodes(2, 4), COSTS, 1 << 14) == seconds
    inside = all_reduce_s("ring", size, nodes(1, n), COSTS)
    assert inside == pytest.approx(
        14 * INSIDE.alpha_s + size * (1.75 / 100e9 + 0.875 / 50e9)
    )


def test_closed_forms_of_the_tree():
    """Rounds of S, but of S/2 at the root; further pieces cost two rounds each."""
    alpha, beta = 3.0, 0.5
    costs = LinkCosts(FREE, LinkCost(alpha, beta))
    size = 1024
    whole = all_reduce_s("tree", size, flat(8), costs)
    assert whole == 6 * alpha + 5 * size * beta
    # Each half is cut into 8 pieces.
    pieces = all_reduce_s("tree", size, flat(8), costs, 64)
    assert pieces == (6 + 2 * 7) * alpha + (5 + 2 * 7) * size / 8 * beta
    # A broadcast of a chain in m pieces: (n + m - 2) (alpha + beta S/m).
    chain = ALGORITHMS["ring"].broadcast(8, size // 4, 0)
    pieces = price(chain, flat(8), costs, 4, 64)
    assert pieces == (8 + 16 - 2) * (alpha + beta * size / 16)


def test_trees_over_nodes():
    """5 levels of 32 ranks, of which 2 are inside nodes of 8; 3 S cross in pieces."""
    size = 1 << 20
    messages = LinkCosts(LinkCost(1.0, 0.0), LinkCost(100.0, 0.0))
    assert all_reduce_s("tree", size, nodes(4, 8), messages) == 2 * (2 + 300)
    pieces = all_reduce_s("tree", size, nodes(4, 8), ONLY_BYTES, size // 2048)
    whole = all_reduce_s("tree", size, nodes(4, 8), ONLY_BYTES)
    assert pieces == whole / 1024 + 1023 / 1024 * 3 * size


def test_halving_and_doubling_shares_the_adapters_of_a_node():
    """Distances 8, 4, 2, 1 over nodes of 4: 4, 4, 2 and 1 ranks send out of each."""
    size = 1 << 20
    seconds = all_reduce_s("halving_doubling", size, nodes(4, 4), ONLY_BYTES)
    assert seconds == 2 * size * (4 / 2 + 4 / 4 + 2 / 8 + 1 / 16)


@given(st.integers(2, 64), st.sampled_from(sorted(ALGORITHMS)), st.integers(0, 999))
def test_prices_add_up_the_loads_where_all_links_are_equal(n, name, numel):
    """Hockney's cost: alpha a round, and beta a byte of the busiest rank."""
    link = LinkCost(3.0, 0.5)
    for collective in ("all_reduce", "broadcast"):
        root = (0,) if collective == "broadcast" else ()
        schedule = getattr(ALGORITHMS[name], collective)(n, numel, *root)
        expected = sum(r * (3.0 + 0.5 * 4 * e) for r, e, *_ in schedule.loads)
        assert price(schedule, flat(n), LinkCosts(link, link)) == expected


def test_two_levels_send_least_between_nodes():
    size = 16 * 1000
    seconds = all_reduce_s("two_levels", size, nodes(4, 4), ONLY_BYTES)
    assert seconds == 2 * 3 / 4 * size
    assert all_reduce_s("two_levels", size, nodes(4, 4), ONLY_MESSAGES) == 6
    # Pieces of an eighth: exchanges inside nodes are hidden but for one piece.
    inside = LinkCosts(LinkCost(0.0, 1 / 16), LinkCost(0.0, 1.0))
    pieces = all_reduce_s("two_levels", size, nodes(4, 4), inside, size // 8)
    assert pieces == 2 * 3 / 4 * size * (1 + 1 / 16 / 8)
    # Of unequal nodes one rank each exchanges all.
    seven = RankLayout(7, 2, 4)
    assert all_reduce_s("two_levels", size, seven, ONLY_BYTES) == size
    inside = LinkCosts(LinkCost(1.0, 0.0), FREE)
    assert all_reduce_s("two_levels", size, seven, inside) == 6 + 3


def test_servers_and_switches():
    size = 1 << 20
    for num_nodes in (2, 5, 400):
        layout = nodes(num_nodes, 8)
        servers = all_reduce_s("parameter_server", size, layout, ONLY_BYTES)
        assert servers == 2 * size
        assert all_reduce_s("parameter_server", size, layout, ONLY_MESSAGES) == 2
        assert all_reduce_s("in_network", size, layout, ONLY_BYTES) == size
        assert all_reduce_s("in_network", size, layout, ONLY_MESSAGES) == 2
    alone = all_reduce_s("in_network", size, nodes(1, 8), COSTS)
    assert alone == pytest.approx(all_reduce_s("ring", size, nodes(1, 8), COSTS))


def test_nccl_leaves_the_ring_where_latency_rules():
    layout = nodes(128, 8)
    for size, is_tree in ((1 << 12, True), (1 << 36, False)):
        nccl = all_reduce_s("nccl", size, layout, COSTS)
        ring = all_reduce_s("ring", size, layout, COSTS)
        assert bool(nccl < ring) is is_tree
        assert nccl <= ring


def test_nccl_has_a_tree_of_nodes_and_a_chain_in_each():
    layout, piece = nodes(8, 4), 512 << 10
    # Whichever binds in the pieces after the first: all send them up and down.
    for inside, between, further in (
        (LinkCost(1.0, 0.0), LinkCost(50.0, 0.0), 100.0),
        (LinkCost(90.0, 0.0), LinkCost(50.0, 0.0), 180.0),
    ):
        costs = LinkCosts(inside, between)
        first = 6 * inside.alpha_s + 6 * between.alpha_s
        assert all_reduce_s("nccl", piece, layout, costs) == first
        assert all_reduce_s("nccl", 4 * piece, layout, costs) == first + 3 * further
    single = all_reduce_s("nccl", 4 * piece, flat(8), costs)
    assert single == 6 * 50.0 + 3 * 100.0


def test_oversubscription_counts_for_ranks_that_talk_over_leaves():
    size, layout = 1 << 20, nodes(16, 4)
    thin = ONLY_BYTES._replace(oversubscription=3.0, nodes_per_leaf=4)
    for name in ("ring", "two_levels", "in_network"):
        even = all_reduce_s(name, size, layout, ONLY_BYTES)
        assert all_reduce_s(name, size, layout, thin) == even
        # One crossing a leaf is slower than its nodes if the leaf has one way out.
        thinner = thin._replace(oversubscription=8.0)
        assert all_reduce_s(name, size, layout, thinner) == 2 * even
    servers = all_reduce_s("parameter_server", size, layout, thin)
    assert servers == 3 * 2 * size
    # Of the distances 32, 16, 8, ... the first two leave the leaf of 16 ranks with all
    # ranks, and the others with 8, 4, 2, 1.
    far = all_reduce_s("halving_doubling", size, layout, thin)
    rounds = [(3 * 4, 2), (3 * 4, 4), (6, 8), (4, 16), (2, 32), (1, 64)]
    assert far == 2 * size * sum(lines / share for lines, share in rounds)
    one_leaf = thin._replace(nodes_per_leaf=16)
    even = all_reduce_s("halving_doubling", size, layout, ONLY_BYTES)
    assert all_reduce_s("halving_doubling", size, layout, one_leaf) == even


@given(LAYOUTS, SIZES, NAMES, PIECES)
@settings(max_examples=50)
def test_free_links_and_single_ranks_cost_nothing(layout, size, name, piece_bytes):
    free = LinkCosts(FREE, FREE)
    assert all_reduce_s(name, size, layout, free, piece_bytes) == 0
    assert all_reduce_s(name, size, nodes(1, 1), COSTS, piece_bytes) == 0
    if layout.num_ranks > 1:
        seconds = all_reduce_s(name, size, layout, COSTS, piece_bytes)
        assert 0 < seconds < math.inf


@given(LAYOUTS, SIZES, NAMES, PIECES, st.data())
@settings(max_examples=100)
def test_no_price_falls(layout, size, name, piece_bytes, data):
    more, factor = data.draw(st.integers(0, 1 << 24)), data.draw(st.floats(1, 9))
    thin = COSTS._replace(oversubscription=2.0, nodes_per_leaf=3)
    seconds = all_reduce_s(name, size, layout, thin, piece_bytes)
    least = seconds * (1 - 1e-12)
    assert all_reduce_s(name, size + more, layout, thin, piece_bytes) >= least
    which = data.draw(st.sampled_from(["inside", "between", "oversubscription"]))
    if which == "oversubscription":
        worse = thin._replace(oversubscription=2.0 * factor)
    else:
        link = getattr(thin, which)
        field = data.draw(st.sampled_from(link._fields))
        slower = link._replace(**{field: getattr(link, field) * factor})
        worse = thin._replace(**{which: slower})
    assert all_reduce_s(name, size, layout, worse, piece_bytes) >= least


@given(LAYOUTS, SIZES, NAMES, PIECES)
@settings(max_examples=50)
def test_arrays_of_costs_are_priced_as_each_of_them(layout, size, name, piece_bytes):
    rng = np.random.default_rng(size)
    inside, between = rng.uniform(1e-9, 1e-6, (2, 3, 5))
    oversubscription = rng.uniform(1.0, 9.0, (4, 1))

    def seconds(*values):
        a, b, thin = values
        links = LinkCost(a[0], a[1], a[2]), LinkCost(b[0], b[1], b[2])
        costs = LinkCosts(*links, thin, 2)
        return all_reduce_s(name, size, layout, costs, piece_bytes)

    all_at_once = np.broadcast_to(seconds(inside, between, oversubscription), (4, 5))
    for row in range(4):
        for column in range(5):
            one = seconds(inside[:, column], between[:, column], oversubscription[row])
            assert all_at_once[row, column] == pytest.approx(np.squeeze(one))


def test_unknown_algorithms_are_refused():
    with pytest.raises(UsageError, match=r"one of ring, tree, .*nccl, got 'butterfly'"):
        all_reduce_s("butterfly", 8, flat(2), COSTS)


N = 4
ROUNDS, FACTOR = 2 * (N - 1), 2 * (N - 1) / N
SWEEP = [4.0 * 4**k for k in range(14)]


def sweep(alpha: float, beta: float, spread: float):
    """Return times of an all_reduce by a ring, with noise."""
    noise = np.random.default_rng(7).uniform(1 - spread, 1 + spread, len(SWEEP))
    return (ROUNDS * alpha + FACTOR * beta * np.array(SWEEP)) * noise


# Ethernet, InfiniBand, and links of which only one cost can be seen.
@pytest.mark.parametrize(
    ("alpha", "beta"), [(50e-6, 8e-9), (2e-6, 1e-10), (0.0, 1e-9), (30e-6, 0.0)]
)
def test_fits_recover_a_link(alpha, beta):
    exact = fit_link(SWEEP, sweep(alpha, beta, 0.0), ROUNDS, FACTOR)
    assert exact.alpha_s == pytest.approx(alpha, abs=1e-12)
    assert exact.beta_s_per_byte == pytest.approx(beta, abs=1e-15)
    assert exact.largest_residual == pytest.approx(0, abs=1e-9)
    noisy = fit_link(SWEEP, sweep(alpha, beta, 0.05), ROUNDS, FACTOR)
    # 11 times that are off by at most 5 % each.
    assert noisy.alpha_s == pytest.approx(alpha, rel=0.1, abs=1e-7)
    assert noisy.beta_s_per_byte == pytest.approx(beta, rel=0.1, abs=1e-12)
    assert 0 < noisy.largest_residual < 0.15
    assert noisy.alpha_s >= 0 <= noisy.beta_s_per_byte


def test_short_messages_do_not_count():
    seconds = sweep(50e-6, 8e-9, 0.0)
    seconds[:5] *= 40
    fit = fit_link(SWEEP, seconds, ROUNDS, FACTOR)
    assert fit.alpha_s == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1 << 20], [1e-3], "sizes must be at least 2 .* got 1. Measure"),
        ([8, 1 << 20, 1 << 20], [1e-3] * 3, "sizes must be at least 2 .* got 1."),
        ([8, 16], [1e-3] * 2, "got 0."),
        ([4096, 8192, 16384], [1e-3, 5e-3, 1e-3], "within 30 %, got .* [0-9]{2} %"),
    ],
)
def test_times_that_fit_no_link_are_refused(sizes, seconds, message):
    with pytest.raises(UsageError, match=message):
        fit_link(sizes, seconds, ROUNDS, FACTOR)


def test_predictions_do_not_load_torch():
    code = (
        "import sys; import ronde.plan.walk, ronde.parallel.buckets; "
        "import ronde.collectives.pricing, ronde.collectives.fitting; "
        "from ronde.collectives import all_reduce_s; from ronde.parallel import Slot; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=HANG_S)
    assert done.returncode == 0
