"""A drawing of a host says what is there, and nothing in it lies on something else."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st
from tests.topology.sample_hosts import B200, FILES, OCI_H100, PERLMUTTER, sample_host

from ronde.render import draw_svg
from ronde.topology import (
    NVSWITCH,
    GpuDevice,
    HostTopology,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
)

SVG = "{http://www.w3.org/2000/svg}"
BOXES = {"gpu", "nic", "switch", "other"}


@dataclass(frozen=True)
class Rect:
    """A rectangle of a drawing."""

    kind: str
    x: float
    y: float
    right: float
    bottom: float

    def meets(self, other: "Rect") -> bool:
        return (
            self.x < other.right
            and other.x < self.right
            and self.y < other.bottom
            and other.y < self.bottom
        )

    def holds(self, other: "Rect") -> bool:
        return (
            self.x <= other.x
            and self.y <= other.y
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


def root_of(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - it is our own


def placed(svg: str, tag: str) -> Iterator[tuple[ET.Element, float, float]]:
    """Yield the elements of a sort, each with its place on the page."""
    waiting = [(root_of(svg), 0.0, 0.0)]
    while waiting:
        element, x, y = waiting.pop(0)
        x, y = x + float(element.get("x", 0)), y + float(element.get("y", 0))
        if element.tag == f"{SVG}{tag}":
            yield element, x, y
        inner = (x, y) if element.tag == f"{SVG}svg" else (0.0, 0.0)
        waiting[:0] = [(child, *inner) for child in element]


def rects(svg: str, *kinds: str) -> list[Rect]:
    found: list[Rect] = []
    for each, x, y in placed(svg, "rect"):
        right = x + float(each.get("width", 0))
        bottom = y + float(each.get("height", 0))
        kind = each.get("class", "")
        if not kinds or kind in kinds:
            found.append(Rect(kind, x, y, right, bottom))
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text, _, _ in placed(svg, "text")]


def check_layout(svg: str) -> None:
    """Assert that boxes do not meet, and that words begin in boxes of their own."""
    page = rects(svg, "page")[0]
    boxes, nodes = rects(svg, *BOXES), rects(svg, "numa")
    for one, other in [*combinations(boxes, 2), *combinations(nodes, 2)]:
        assert not one.meets(other), (one, other)
    for box in boxes:
        assert any(node.holds(box) for node in nodes), box
    for box in rects(svg):
        assert page.holds(box), box
    places = [(x, y) for _, x, y in placed(svg, "text")]
    assert len(places) == len(set(places))
    for x, y in places:
        assert page.holds(Rect("", x, y - 8, x, y))
        for box in boxes:
            assert box.holds(Rect("", x, y - 8, x, y)) or not box.meets(
                Rect("", x, y - 8, x + 1, y)
            )


@pytest.mark.parametrize("name", FILES)
def test_samples_are_drawn_with_all_they_have(name: str) -> None:
    host = sample_host(name)
    svg = draw_svg(host)
    said = texts(svg)

    check_layout(svg)
    for gpu in host.gpus:
        assert f"GPU {gpu.number}" in said
        assert gpu.bus_id in said
    assert len(rects(svg, "gpu")) == len(host.gpus)
    assert len(rects(svg, "numa")) >= len(host.numa_nodes)
    for node in host.numa_nodes:
        assert any(text.startswith("NUMA node") for text in said), node
    adapters = {port.bus_id or port.name for port in host.ports}
    assert len(rects(svg, "nic")) == len(adapters)


def test_nodes_and_adapters_have_their_names() -> None:
    said = texts(draw_svg(sample_host(PERLMUTTER)))

    # As they stand in the file: four adapters of Slingshot, 200 Gb/s each.
    for name in ("cxi0", "cxi1", "cxi2", "cxi3"):
        assert name in said
    assert said.count("200 Gb/s") == 4
    assert said.count("PCI 16.0 GT/s x16, 24 GB/s") == 8
    for number in range(4):
        assert f"NUMA node {number}" in said
    assert "NVLink: every GPU: 4 each to the other GPUs, 80 GB/s" in said
    assert said.count("16 GB/s to other nodes") == 4


def test_cpus_that_are_spread_are_reported_by_their_ends() -> None:
    nodes = (
        NumaNode(0, cpus=tuple(range(0, 64, 2))),
        NumaNode(1, cpus=(1, 3), cores=((1,), (3,))),
    )
    said = texts(draw_svg(HostTopology(numa_nodes=nodes)))

    assert "32 CPUs from 0 to 62" in said
    assert {"2 cores", "CPUs 1,3"} <= set(said)


def test_switches_of_nvlink_are_one_bar() -> None:
    """18 links of 40.1 GB/s are 721.8, of 20.6 they are 370.8."""
    b200, h100 = (texts(draw_svg(sample_host(name))) for name in (B200, OCI_H100))

    bar = "NVLink: every GPU: 18 to NVSwitch, {} GB/s"
    assert bar.format("721.8") in b200
    assert bar.format("370.8") in h100


def test_links_that_are_not_alike_are_several_bars() -> None:
    """Each of 8 GPUs has one link to 6 of the others; two lack the same one."""
    svg = draw_svg(sample_host("topo_8p6l.xml"))

    assert len(rects(svg, "fabric")) == 4
    assert "xGMI: GPUs 0,5: 1 each to GPUs 1-4,6-7, 24 GB/s" in texts(svg)


def test_what_is_below_a_switch_hangs_below_it() -> None:
    svg = draw_svg(sample_host(B200))
    switches, gpus = rects(svg, "switch"), rects(svg, "gpu")

    assert len(switches) == 4
    for gpu in gpus:
        above = [s for s in switches if s.x < gpu.x and gpu.right <= s.right]
        assert any(s.bottom < gpu.y for s in above)


def test_nodes_have_their_sockets() -> None:
    nodes = tuple(
        NumaNode(n, cpus=(2 * n, 2 * n + 1), package=n // 2) for n in range(4)
    )
    said = texts(draw_svg(HostTopology(name="host", numa_nodes=nodes)))

    assert [text for text in said if "socket" in text] == (
        ["socket 0"] * 2 + ["socket 1"] * 2
    )


def test_devices_of_no_known_node_are_drawn() -> None:
    host = HostTopology(
        devices=(PciDevice("0000:01:00.0", speed="16.0 GT/s PCIe", width=16),),
        gpus=(GpuDevice("0000:01:00.0", 0), GpuDevice("", 1)),
        ports=(NetPort("lo0"),),
    )
    svg = draw_svg(host)

    check_layout(svg)
    assert {"This host", "GPU 0", "GPU 1", "lo0"} <= set(texts(svg))


def test_a_narrow_bridge_is_reported_at_the_one_thing_behind_it() -> None:
    host = HostTopology(
        devices=(
            PciDevice("0000:00:01.0", speed="2.5 GT/s PCIe", width=1),
            PciDevice("0000:01:00.0", "0000:00:01.0", speed="16.0 GT/s PCIe", width=16),
        ),
        gpus=(GpuDevice("0000:01:00.0", 0),),
    )
    said = texts(draw_svg(host))

    assert "behind 0000:00:01.0" in said
    assert "PCI 2.5 GT/s x1, 0.19 GB/s" in said  # 15 / 80


def test_other_devices_are_counted_only() -> None:
    devices = tuple(PciDevice(f"0000:00:{n:02x}.0") for n in range(7))
    said = texts(draw_svg(HostTopology(name="host", devices=devices)))

    assert "no GPUs, no network ports, 7 other PCI devices not drawn" in said[1]


# ---- harm


@pytest.mark.parametrize(
    "name",
    [
        "<script>alert(1)</script>",
        'a" onload="x',
        "]]>&amp;<!--",
        "\x00\x07\x1b[31m",
        "\u202egnp.exe",
        "x" * 5000,
        "名前" * 300,
        "",
    ],
)
def test_hostile_names_stay_words(name: str) -> None:
    host = HostTopology(
        name=name,
        numa_nodes=(NumaNode(0, cpus=(0,), vendor=name, arch=name),),
        devices=(PciDevice("0000:01:00.0", node=0, speed=name, width=16),),
        gpus=(GpuDevice("0000:01:00.0", 0, title=name, gcn=name),),
        ports=(NetPort(name, node=0, kind=name),),
        links=(Link(LinkKind.NVLINK, "0000:01:00.0", name, 3),),
    )
    svg = draw_svg(host)

    tags = {each.tag.removeprefix(SVG) for each in root_of(svg).iter()}
    assert tags <= {"svg", "title", "style", "rect", "text", "line"}
    attributes = {key for each in root_of(svg).iter() for key in each.attrib}
    assert not {key for key in attributes if key.startswith("on") or "href" in key}
    check_layout(svg)


def test_a_huge_host_is_drawn_in_part() -> None:
    devices = tuple(
        PciDevice(f"{n:04x}:00:00.0", node=n % 100, width=16) for n in range(9000)
    )
    host = HostTopology(
        name="huge",
        numa_nodes=tuple(NumaNode(n, cpus=tuple(range(500))) for n in range(300)),
        devices=devices,
        gpus=tuple(GpuDevice(d.bus_id, n) for n, d in enumerate(devices)),
        links=tuple(
            Link(LinkKind.NVLINK, d.bus_id, devices[0].bus_id, n % 5)
            for n, d in enumerate(devices)
        ),
    )
    begin_s = time.process_time()
    svg = draw_svg(host)

    assert time.process_time() - begin_s < 10.0
    assert len(svg) < 2_000_000
    assert any(text == "236 more nodes" for text in texts(svg))
    assert any(re.fullmatch(r"and \d+ more", text) for text in texts(svg))


def test_bridges_without_end_are_drawn() -> None:
    devices = [PciDevice("0000:00:00.0")]
    for number in range(1, 250):
        above = devices[-1].bus_id
        devices.append(PciDevice(f"0000:{number:02x}:00.0", above))
    host = HostTopology(devices=tuple(devices), ports=(NetPort("a", "0000:01:00.0"),))

    check_layout(draw_svg(host))


BUSES = st.integers(0, 14)


@st.composite
def hosts(draw: st.DrawFn) -> HostTopology:
    """Draw any host: bridges in any depth, devices that nobody lists, any links."""
    packages = draw(st.lists(st.integers(-1, 4), max_size=5))
    parents = draw(st.lists(st.integers(-1, 12), max_size=14))
    gpus = sorted(draw(st.sets(BUSES, max_size=6)))
    ports = draw(st.lists(BUSES, max_size=6))
    links = draw(st.lists(st.tuples(BUSES, BUSES), max_size=8))
    return HostTopology(
        name="any",
        numa_nodes=tuple(
            NumaNode(n, cpus=(n,), package=package)
            for n, package in enumerate(packages)
        ),
        devices=tuple(
            PciDevice(f"{n}", f"{parent}" if 0 <= parent < n else "", node=n % 3)
            for n, parent in enumerate(parents)
        ),
        gpus=tuple(GpuDevice(f"{bus}", n) for n, bus in enumerate(gpus)),
        ports=tuple(NetPort(f"p{n}", f"{bus}") for n, bus in enumerate(ports)),
        links=tuple(Link(LinkKind.XGMI, f"{a}", f"{b}", 1, 5.0) for a, b in links),
    )


@settings(max_examples=60, deadline=None)
@given(hosts())
def test_nothing_lies_on_something_else(host: HostTopology) -> None:
    svg = draw_svg(host)

    check_layout(svg)
    assert len(rects(svg, "gpu")) == len(host.gpus)


def test_it_stands_alone() -> None:
    host = sample_host(B200)
    svg = draw_svg(
        host._replace(
            links=(
                *host.links,
                Link(LinkKind.C2C, host.gpus[0].name, NVSWITCH, 1, 450.0),
            )
        )
    )

    assert "url(" not in svg
    assert "@import" not in svg
    assert svg.count("http") == 1  # the name of SVG itself
    assert any(text.startswith("C2C: GPU 0: 1 to ") for text in texts(svg))


def test_it_is_written_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "host.svg"
    path.write_text(draw_svg(sample_host(B200)), encoding="utf-8")

    assert root_of(path.read_text(encoding="utf-8")).tag == f"{SVG}svg"


def test_an_unknown_chip_s_links_are_counted_only() -> None:
    said = texts(draw_svg(sample_host("hgx_b200_8x_drv595.91.txt")))
    assert "NVLink: every GPU: 18 to NVSwitch" in said
    uneven = sample_host("perlmutter_a100_4x_drv580.159.txt")
    uneven = uneven._replace(
        links=(uneven.links[0]._replace(num_links=2), *uneven.links[1:])
    )
    bars = [text for text in texts(draw_svg(uneven)) if text.startswith("NVLink")]
    assert len(bars) == 2
    assert any("GPU 0: 2 to GPU 1; 4 each to GPUs 2-3" in bar for bar in bars)


def test_only_nvidia_s_switches_are_nvswitches() -> None:
    switch = PciDevice("0000:02:00.0", class_code=0x068000, vendor=0x10DE)
    other = PciDevice("0000:03:00.0", class_code=0x068000, vendor=0x8086)
    said = texts(draw_svg(HostTopology(devices=(switch, other))))
    assert said.count("NVSwitch") == 1
    assert "0000:02:00.0" in said
    assert "0000:03:00.0" not in said
    assert not any("PCI" in line and "GB/s" in line for line in said[2:])
