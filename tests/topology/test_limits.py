"""The bound of each collective: formulas, worlds, and laws that hold of all."""

import pytest
from hypothesis import given, strategies as st

from ronde.bench import COLLECTIVES as MEASURED
from ronde.topology import (
    COLLECTIVES,
    Islands,
    Limit,
    LimitWorld,
    RankLayout,
    Rate,
    bound_of,
    gpu_bound,
    memory_bound,
    network_bound,
)

TWO_H100 = RankLayout(16, 2, 8)
NVLINK = Rate("NVLink", 450, 18 * 20.6)
PORTS = Rate("8 ports", 400)
TWO_NODES = LimitWorld(
    TWO_H100, PORTS, Rate("1 port", 50), NVLINK, has_gpus=True, has_nvls=True
)


def limit(world: LimitWorld, collective: str = "all_reduce") -> Limit:
    found = bound_of(world, collective).limit
    assert found is not None
    return found


def nodes(num_nodes: int, gb_per_s: float) -> LimitWorld:
    """Return nodes with a rank on each of 8 GPUs, by their network alone."""
    layout = RankLayout(8 * num_nodes, num_nodes, 8)
    return LimitWorld(layout, Rate("network", gb_per_s), has_gpus=True)


# By hand, for all_reduce unless said otherwise: what binds, and how much that is.
@pytest.mark.parametrize(
    ("world", "collective", "gb_per_s", "link"),
    [
        pytest.param(TWO_NODES, "all_reduce", 450 * 15 / 14, "NVLink", id="2x8"),
        pytest.param(nodes(2, 400), "all_reduce", 750, "network", id="its network"),
        pytest.param(TWO_NODES, "alltoall", 93.75, "8 ports", id="2x8 alltoall"),
        pytest.param(TWO_NODES, "broadcast", 400, "8 ports", id="2x8 broadcast"),
        pytest.param(TWO_NODES, "gather", 450, "NVLink", id="2x8 gather"),
        pytest.param(TWO_NODES, "sendrecv", 50, "1 port", id="2x8 sendrecv"),
        pytest.param(nodes(2, 50), "all_reduce", 93.75, "network", id="A100 4x100G"),
        pytest.param(
            nodes(16, 400), "all_reduce", 400 * 127 / 120, "network", id="16x8"
        ),
        pytest.param(nodes(8, 400), "all_reduce", 450, "network", id="8x8"),
        pytest.param(
            LimitWorld(RankLayout(8, 1, 8), gpu=Rate("NVLink", 12 * 25), has_gpus=True),
            *("all_reduce", 300, "NVLink"),
            id="8 A100",
        ),
        pytest.param(
            LimitWorld(RankLayout(4, 4, 1), Rate("eth0", 3.125)),
            *("all_reduce", 3.125, "eth0"),
            id="4 hosts at 25 Gbit/s",
        ),
    ],
)
def test_worked_examples(
    world: LimitWorld, collective: str, gb_per_s: float, link: str
) -> None:
    found = limit(world, collective)
    assert found.bus_bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=1e-12)
    assert found.link == link


def test_what_switches_and_rings_change_is_noted() -> None:
    note = limit(TWO_NODES).note
    assert note.split("; ") == [
        # 450 * 30/16 * 8/9 of NVLink, 400 * 2 * 15/16 of the network: both are 750.
        "switches that reduce (NVLS) allow 750 GB/s, set by 8 ports",
        "a pure ring reaches at most 400 GB/s",
    ]
    eight = TWO_NODES._replace(layout=RankLayout(64, 8, 8))
    assert limit(eight).note.split("; ") == [
        # 450 * 63/64 * 8/7; and with both 400 * 2 * 63/64, NVLink just as much.
        "switches that reduce (SHARP) allow 506.2 GB/s, set by NVLink",
        "switches that reduce (NVLS and SHARP) allow 787.5 GB/s, set by 8 ports",
        "a pure ring reaches at most 400 GB/s",
    ]
    assert limit(eight, "all_gather").note == "a pure ring reaches at most 400 GB/s"
    no_switch = eight._replace(has_nvls=False)
    assert "NVLS" not in limit(no_switch).note
    assert limit(TWO_NODES, "broadcast").note == ""


def test_what_nccl_counts_on_stands_beside() -> None:
    found = limit(TWO_NODES)
    # 18 * 20.6 * 15/16 * 8/7
    assert found.practical_gb_per_s == pytest.approx(397.2857, abs=1e-4)
    assert found.practical_link == "NVLink"
    slow_bus = TWO_NODES._replace(network=Rate("ports", 400, 8 * 24))
    assert limit(slow_bus).link == "NVLink"
    assert limit(slow_bus).practical_gb_per_s == 8 * 24 * 2 * 15 / 16
    assert limit(slow_bus).practical_link == "ports"
    on_cpus = LimitWorld(RankLayout(4, 4, 1), Rate("eth0", 3.125, 3))
    assert limit(on_cpus).practical_gb_per_s is None


def test_islands_of_gpus() -> None:
    """Two pairs with NVLink: what a pair cannot add up itself crosses PCIe."""
    world = LimitWorld(
        RankLayout(4, 1, 4), islands=Islands(2, Rate("PCIe", 2 * 31.5)), has_gpus=True
    )
    assert limit(world).bus_bandwidth_gb_per_s == 2 * 31.5 * 2 * 3 / 4
    assert limit(world, "alltoall").bus_bandwidth_gb_per_s == 31.5 * 2 * 3 / 4
    assert limit(world).link == "PCIe"


def test_no_bound_has_a_reason() -> None:
    one = LimitWorld(RankLayout(1, 1, 1), PORTS)
    assert bound_of(one, "all_reduce") == (
        "all_reduce",
        None,
        "one rank exchanges nothing",
    )
    assert bound_of(TWO_NODES, "allreduce").reason == "allreduce has no formula"
    unknown = LimitWorld(TWO_H100, unknown=("nobody tells the network",))
    assert bound_of(unknown, "broadcast").reason == "nobody tells the network"
    assert bound_of(LimitWorld(RankLayout(2, 1, 2)), "broadcast").reason


# Bytes read and written on one host by 4 ranks, in place, by the size of a row; and
# busbw by algbw. Counted by hand.
@pytest.mark.parametrize(
    ("test", "num_read", "num_written", "factor"),
    [
        ("all_reduce", 4, 4, 3 / 2),
        ("all_gather", 4 / 4, 4 * 3 / 4, 3 / 4),
        ("reduce_scatter", 4, 4 / 4, 3 / 4),
        ("broadcast", 1, 3, 1),
        ("reduce", 4, 1, 1),
        ("alltoall", 4 * 3 / 4, 4 * 3 / 4, 3 / 4),
        ("alltoallv", 4 * 3 / 4, 4 * 3 / 4, 3 / 4),
        ("scatter", 3 / 4, 3 / 4, 3 / 4),
        ("gather", 3 / 4, 3 / 4, 3 / 4),
        ("sendrecv", 4, 4, 1),
        # algbw counts what a rank receives, of 4 shares 3.
        ("hypercube", 4 / 3, 4, 1),
    ],
)
def test_memory_reads_and_writes_every_byte_once(
    test: str, num_read: float, num_written: float, factor: float
) -> None:
    bound = memory_bound(test, RankLayout(4, 1, 4), 40)
    assert bound == pytest.approx(40 / (num_read + num_written) * factor)


@pytest.mark.parametrize("test", sorted(MEASURED))
def test_every_collective_has_its_formulas(test: str) -> None:
    for n in (2, 3, 8, 64):
        for bound in (
            memory_bound(test, RankLayout(n, 1, n), 100),
            network_bound(test, RankLayout(n, n, 1), 100),
            gpu_bound(test, RankLayout(n, 1, n), 100),
        ):
            assert 0 < bound <= 200


def test_the_bound_is_never_clipped() -> None:
    bound = Limit(100, "x")
    assert bound.percent(150) == 150
    assert bound.warning(100) == ""
    assert bound.warning(150).startswith("150 % of the bound: an assumption")
    assert "caches" in Limit(100, "memory, 400 GB/s").warning(101)


rates = st.floats(0.1, 1e4).flatmap(
    lambda gb_per_s: st.floats(0.05, gb_per_s).map(
        lambda practical: Rate(f"link of {gb_per_s}", gb_per_s, practical)
    )
)


@st.composite
def worlds(draw: st.DrawFn) -> LimitWorld:
    num_nodes, g = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    layout = RankLayout(num_nodes * g, num_nodes, g)
    network, gpu, memory = (draw(st.none() | rates) for _ in range(3))
    return LimitWorld(
        layout,
        network,
        None,
        gpu,
        None,
        memory,
        draw(st.booleans()),
        draw(st.booleans()),
    )


collectives = st.sampled_from(COLLECTIVES)


@given(worlds(), collectives)
def test_one_rank_has_none_and_the_least_binds(
    world: LimitWorld, collective: str
) -> None:
    found = bound_of(world, collective)
    assert (found.limit is None) == bool(found.reason)
    if world.layout.num_ranks == 1:
        assert found.limit is None
    if found.limit is None:
        return
    for name in ("network", "gpu", "memory"):
        others = {"network", "gpu", "memory"} - {name}
        alone = world._replace(**dict.fromkeys(others))
        single = bound_of(alone, collective).limit
        if single is not None:
            least = found.limit.bus_bandwidth_gb_per_s
            assert least <= single.bus_bandwidth_gb_per_s
