from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings, strategies as st
from tests.topology.sample_hosts import (
    B200,
    FILES,
    H200,
    PERLMUTTER,
    sample_host,
)

from ronde.topology import (
    NVSWITCH,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    Path,
    PathKind,
    PathNetwork,
    Paths,
    PciDevice,
    Relation,
    VertexKind,
    find_paths,
    join_switches,
)

GEN3 = "8.0 GT/s PCIe"
GEN4 = "16.0 GT/s PCIe"
INTEL = NumaNode(0, arch="x86_64", vendor="GenuineIntel", family=6, model=85)
AMD = NumaNode(0, arch="x86_64", vendor="AuthenticAMD", family=175, model=1)


def figures(path: Path | None) -> tuple[int, float, str]:
    """What NCCL prints of a path: hops, GB/s to a digit, kind."""
    assert path is not None
    return len(path.route) - 1, round(path.gb_per_s, 1), path.kind.value


def bridge(bus_id: str, parent: str = "", speed: str = GEN4, node: int = 0):
    return PciDevice(bus_id, parent, node, class_code=0x060400, speed=speed, width=16)


def gpu(number: int, parent: str = "", node: int = 0, **more: int):
    """A GPU, and its device."""
    bus_id = f"0000:{0x40 + number:02x}:00.0"
    device = PciDevice(bus_id, parent, node, 0x030200, speed=GEN4, width=16)
    return GpuDevice(bus_id, number, **{"sm": 80, "gdr": 1, **more}), device


def nic(number: int, parent: str = "", node: int = 0, **more: int):
    """A port of 25 GB/s, and its device."""
    bus_id = f"0000:{0x80 + number:02x}:00.0"
    device = PciDevice(bus_id, parent, node, 0x020000, speed=GEN4, width=16)
    reported = {"mbit_per_s": 200000, "gdr": 1, **more}
    return NetPort(f"mlx5_{number}", bus_id, number=number, **reported), device


def make_host(*elements, bridges=(), nodes=(INTEL,), links=()) -> HostTopology:
    return HostTopology(
        numa_nodes=tuple(nodes),
        devices=(*bridges, *(device for _, device in elements)),
        gpus=tuple(e for e, _ in elements if isinstance(e, GpuDevice)),
        ports=tuple(e for e, _ in elements if isinstance(e, NetPort)),
        links=tuple(links),
    )


class TestSamples:
    def test_perlmutter_is_what_nccl_printed(self):
        paths = find_paths(sample_host(PERLMUTTER))
        assert figures(paths.between("net/cxi2", "0000:41:00.0")) == (3, 24.0, "PHB")
        assert figures(paths.between("net/cxi2", "0000:03:00.0")) == (4, 16.0, "SYS")
        direct = paths.between("0000:03:00.0", "0000:c1:00.0")
        assert figures(direct) == (1, 80.0, "NVL")
        assert figures(paths.between("0000:03:00.0", "0000:03:00.0")) == (
            *(0, 5000.0, "LOC"),
        )

    # 18 links of 20.6 and 40.1 GB/s.
    @pytest.mark.parametrize(("name", "gb_per_s"), [(H200, 370.8), (B200, 721.8)])
    def test_nvlinks_to_switches_count_together(self, name, gb_per_s):
        host = sample_host(name)
        paths = find_paths(host)
        edges = paths.network.edges[NVSWITCH]
        assert {edge.gb_per_s for edge in edges} == {gb_per_s}
        for one, other in permutations([each.name for each in host.gpus], 2):
            assert figures(paths.between(one, other)) == (2, gb_per_s, "NVL")

    @pytest.mark.parametrize("name", FILES)
    def test_every_path_is_what_its_route_is(self, name):
        paths = find_paths(sample_host(name))
        for (source, target), path in paths.table.items():
            check_route(paths, source, target, path)


def check_route(paths: Paths, source: str, target: str, path: Path) -> None:
    """Check that figures and route of a path are the same thing."""
    assert (path.route[0], path.route[-1]) == (source, target)
    assert path == follow(paths.network, path.route)


def follow(network: PathNetwork, route: tuple[str, ...]) -> Path:
    """Return the path of a route, as its target sees it."""
    kind, speed = PathKind.LOC, 5000.0
    outward = route[::-1]
    for place, (here, there) in enumerate(pairwise(outward)):
        found = [e for e in network.edges[here] if e.target == there]
        edge = max(found, key=lambda e: e.gb_per_s)
        passes = network.kinds[here] == VertexKind.GPU and here != outward[0]
        is_peer = passes and edge.kind == kind == PathKind.NVL and place > 0
        kind = max(kind, edge.kind, PathKind.NVB if is_peer else PathKind.LOC)
        speed = min(speed, edge.gb_per_s)
    return Path(kind, speed, route)


def all_routes(network: PathNetwork, target: str, source: str) -> list[Path]:
    """Return every route without a circle that NCCL lets pass, by brute force."""
    found: list[Path] = []

    def step(outward: tuple[str, ...]) -> None:
        here = outward[-1]
        if here == source:
            found.append(follow(network, outward[::-1]))
            return
        for edge in network.edges[here]:
            if edge.target in outward:
                continue
            there = network.kinds[edge.target]
            if network.kinds[here] == VertexKind.GPU and here != target:
                is_peer = edge.kind == PathKind.NVL and there == VertexKind.GPU
                if not (is_peer and len(outward) == 2):
                    continue
            step((*outward, edge.target))

    step((target,))
    return found


def mark(path: Path) -> tuple[int, float, int]:
    """How good a path is; smaller is better."""
    return path.kind.rank, -path.gb_per_s, len(path.route)


SPEEDS = st.sampled_from(["2.5 GT/s PCIe", GEN3, GEN4, ""])


@st.composite
def small_hosts(draw: st.DrawFn) -> HostTopology:
    """Hosts of some processors, switches, GPUs and adapters, without NVLink."""
    node = draw(st.sampled_from([INTEL, AMD]))
    num_nodes = draw(st.integers(1, 3))
    nodes = [node._replace(number=number) for number in range(num_nodes)]
    bridges: list[PciDevice] = []
    for number in range(draw(st.integers(0, 4))):
        above = draw(st.sampled_from([None, *bridges]))
        near = above.node if above else draw(st.integers(0, num_nodes - 1))
        parent = above.bus_id if above else ""
        speed = draw(SPEEDS)
        bridges.append(bridge(f"0000:{number:02x}:00.0", parent, speed, near))
    elements = []
    for make in (gpu, nic):
        for number in range(draw(st.integers(1, 3))):
            above = draw(st.sampled_from([None, *bridges]))
            near = above.node if above else draw(st.integers(0, num_nodes - 1))
            elements.append(make(number, above.bus_id if above else "", near))
    return make_host(*elements, bridges=bridges, nodes=nodes)


class TestLaws:
    @given(small_hosts())
    @settings(max_examples=60, deadline=None)
    def test_without_nvlink_none_is_better_than_the_one_found(self, host):
        paths = find_paths(host)
        ends = [each.name for each in (*host.gpus, *host.ports)]
        for one, other in permutations(ends, 2):
            path = paths.between(one, other)
            routes = all_routes(paths.network, other, one)
            assert path in routes
            assert mark(path) == min(map(mark, routes))
            back = paths.between(other, one)
            assert mark(back) == mark(path)
            assert back.route == path.route[::-1]


class TestHosts:
    def test_a_virtual_port_is_at_the_first_processor(self):
        nodes = (AMD, AMD._replace(number=1))
        host = make_host(gpu(0, node=1), nodes=nodes)
        host = host._replace(ports=(NetPort("eth0", mbit_per_s=10000),))
        path = find_paths(host).between("net/eth0", "0000:40:00.0")
        assert figures(path) == (4, 1.2, "SYS")
        assert path.route[:3] == ("net/eth0", "nic/-1", "numa/0")

    def test_a_link_reported_in_one_direction_alone_is_no_path(self):
        link = Link(LinkKind.NVLINK, "0000:40:00.0", "0000:41:00.0", 4)
        paths = find_paths(make_host(gpu(0), gpu(1), links=[link]))
        for ends in permutations(("0000:40:00.0", "0000:41:00.0")):
            assert figures(paths.between(*ends)) == (2, 24.0, "PHB")

    def test_the_class_of_its_target_says_what_a_link_leads_to(self):
        def kind(target_class: int) -> str:
            ends = "0000:40:00.0", "0000:41:00.0"
            links = [
                Link(LinkKind.NVLINK, *pair, 4, target_class=target_class)
                for pair in permutations(ends)
            ]
            host = make_host(gpu(0), gpu(1), links=links)
            route = find_paths(host).between(*ends).route
            return " ".join(route[1:-1])

        assert kind(0x030200) == ""
        assert kind(0x068000) == NVSWITCH
        assert kind(0x068001) == "numa/0"

    def test_a_port_of_which_only_the_bus_is_reported_has_no_limit_of_its_own(self):
        host = make_host(gpu(0), nic(0, mbit_per_s=0))
        known = find_paths(host).between("0000:40:00.0", "net/mlx5_0")
        assert known.gb_per_s == 1.25
        untold = host._replace(ports=(host.ports[0]._replace(number=-1),))
        path = find_paths(untold).between("0000:40:00.0", "net/mlx5_0")
        assert path.gb_per_s == 24.0

    def test_devices_without_numa_node_are_together_as_in_nccl(self):
        host = make_host(
            gpu(0, node=-1),
            gpu(1, node=-1),
            gpu(2, node=1),
            nodes=(AMD, AMD._replace(number=1)),
        )
        paths = find_paths(host)
        first = [paths.between("0000:40:00.0", f"0000:4{n}:00.0") for n in (1, 2)]
        assert [path.kind.value for path in first] == ["PHB", "SYS"]
        assert first[0].route[1] == "numa/-1"

    def test_a_word_on_a_pair_counts_where_no_bus_is_reported(self):
        host = HostTopology(
            numa_nodes=(INTEL,),
            gpus=(GpuDevice("", 0, node=0), GpuDevice("", 1, node=0)),
            ports=(NetPort("mlx5_0", node=0),),
            relations=(
                Relation("gpu/0", "net/mlx5_0", path="PIX"),
                Relation("gpu/0", "gpu/1", path="NODE"),
            ),
        )
        paths = find_paths(host)
        ends = ("gpu/0", "net/mlx5_0"), ("net/mlx5_0", "gpu/0"), ("gpu/1", "net/mlx5_0")
        kinds = [paths.between(*pair).kind.value for pair in ends]
        assert kinds == ["PIX", "PIX", "PHB"]
        assert paths.between("gpu/0", "gpu/1").kind is PathKind.PHB


def broadcom(bus_id: str, parent: str, device: int, family: int) -> PciDevice:
    return bridge(bus_id, parent)._replace(
        vendor=0x1000, device=device, subsystem_vendor=0x1000, subsystem_device=family
    )


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [
        # PCIe 4: by family. PCIe 5: the second level has its own number.
        ((0xC010, 0xA024), (0xC010, 0xA064), (0xC010, 0xB064)),
        ((0xC030, 0x0001), (0xC030, 0x1002), (0xC030, 0x0002)),
    ],
)
def test_levels_of_broadcoms_switches_are_joined(first, second, other):
    devices = [
        broadcom("a", "", *first),
        broadcom("b", "a", *second),
        broadcom("c", "a", *other),
        bridge("d", "b"),
    ]
    assert join_switches(devices) == {"a": "", "c": "a", "d": "a"}
    plain = [bridge("a"), bridge("b", "a"), broadcom("c", "b", 0xC010, 0x1000)]
    assert join_switches(plain) == {"a": "", "b": "a", "c": "b"}
