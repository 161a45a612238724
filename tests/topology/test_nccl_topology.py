from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.render import draw_log_findings
from ronde.topology import (
    MAX_REMARKS,
    NCCL_TOPOLOGY,
    NVSWITCH,
    UNKNOWN,
    HostTopology,
    Link,
    LinkKind,
    Saved,
    lint_fleet,
    lint_host,
    read_topology,
    write_topology,
)

SAMPLES = Path(__file__).parent / "samples"

# Speed of a lane and number of lanes, as files write them.
G1 = ("2.5 GT/s PCIe", 1)
G2 = ("5.0 GT/s PCIe", 16)
G3 = ("8 GT/s", 16)
G4_OLD = ("16 GT/s", 16)
G4 = ("16.0 GT/s PCIe", 16)
G5 = ("32.0 GT/s PCIe", 16)


class Counted(NamedTuple):
    """What grep counts in a sample; links are the sum of all counts."""

    file: str
    num_nodes: int
    num_devices: int
    num_bridges: int
    num_gpus: int
    sm: int
    num_links: int
    speeds: dict[tuple[str, int], int]
    nets: dict[int, int]

    def __str__(self) -> str:
        return self.file

    @property
    def path(self) -> Path:
        folder = "rccl_topo" if self.file.startswith("topo_") else "nccl_topo"
        return SAMPLES / folder / f"{self.file}.xml"


COUNTED = (
    Counted("aws_p4de-24xl-topo", 2, 16, 4, 8, -1, 0, {G3: 16}, {0: 4}),
    Counted("azure_ncv4_a100pcie_topo", 4, 4, 0, 4, 80, 48, {("", 0): 4}, {100000: 1}),
    # eth0 stands there twice, once below each processor.
    Counted(
        "hgx_b200_8x_vastai_nccl2.27.3", 2, 12, 4, 8, 100, 144, {G5: 12}, {10000: 1}
    ),
    Counted("oci_H100-topology", 2, 40, 24, 8, 90, 144, {G5: 32, G2: 8}, {180000: 16}),
    Counted(
        "perlmutter_a100_4x_slingshot_nccl2.29.7",
        *(4, 8, 0, 4, 80, 48, {G4: 8}, {200000: 4}),
    ),
    Counted("topo_4p2h", 1, 19, 10, 8, 64, 16, {G4_OLD: 8, G3: 11}, {100000: 1}),
    Counted("topo_4p_942", 4, 8, 0, 4, 228, 12, {G4: 4, G5: 4}, {200000000: 4}),
    # One device stands there under the address of another.
    Counted("topo_8p1h_1", 2, 30, 18, 8, 104, 52, {G4: 30}, {200000: 4}),
    Counted(
        "topo_8p1h_2",
        *(4, 10, 1, 8, 104, 52, {G4: 8, ("16.0 GT/s PCIe", 4): 1, G1: 1}),
        {1000: 1, 10000: 1},
    ),
    Counted(
        "topo_8p_ts1_n4_2", 8, 18, 8, 8, 64, 16, {G4_OLD: 18}, {100000: 1, 200000: 2}
    ),
)


def read(text: str | bytes) -> tuple[HostTopology, ...]:
    data = text.encode() if isinstance(text, str) else text
    return NCCL_TOPOLOGY.read(Saved("a.xml", data)).hosts


def sample(counted: Counted) -> HostTopology:
    (host,) = read(counted.path.read_bytes())
    return host


def named(file: str) -> HostTopology:
    return sample(next(counted for counted in COUNTED if counted.file == file))


def on_one_node(inside: str) -> HostTopology:
    (host,) = read(
        '<system version="1"><cpu numaid="0" affinity="3" arch="x86_64">'
        f"{inside}</cpu></system>"
    )
    return host


def pci(bus_id: str, inside: str = "", class_code: str = "0x060400") -> str:
    return (
        f'<pci busid="{bus_id}" class="{class_code}" link_speed="" link_width="0">'
        f"{inside}</pci>"
    )


def gpu(dev: int, inside: str = "") -> str:
    return f'<gpu dev="{dev}" sm="90" rank="{dev}" gdr="1">{inside}</gpu>'


def port(name: str, dev: int, more: str = "") -> str:
    return f'<net name="{name}" dev="{dev}" speed="100000" {more}/>'


class TestSamples:
    @pytest.mark.parametrize("counted", COUNTED, ids=str)
    def test_what_was_read_is_what_grep_counts(self, counted: Counted):
        host = sample(counted)

        assert len(host.numa_nodes) == counted.num_nodes
        assert len(host.devices) == counted.num_devices
        bridges = [d for d in host.devices if d.class_code == 0x060400]
        assert len(bridges) == counted.num_bridges
        assert len(host.gpus) == counted.num_gpus
        assert {gpu.sm for gpu in host.gpus} == {counted.sm}
        assert sum(link.num_links for link in host.links) == counted.num_links
        assert Counter((d.speed, d.width) for d in host.devices) == counted.speeds
        assert Counter(port.mbit_per_s for port in host.ports) == counted.nets

    @pytest.mark.parametrize("counted", COUNTED, ids=str)
    def test_a_trip_through_json_loses_nothing(self, counted: Counted):
        data = counted.path.read_bytes()
        topology = NCCL_TOPOLOGY.read(Saved("a.xml", data))

        assert read_topology(write_topology(topology).encode(), "a.json") == topology

    def test_a_node_of_perlmutter(self):
        host = named("perlmutter_a100_4x_slingshot_nccl2.29.7")

        node = host.numa_nodes[3]
        assert node.number == 3
        # Words of 32 bits, highest first: ffff0000,0,ffff0000,0
        assert node.cpus == (*range(48, 64), *range(112, 128))
        assert (node.arch, node.vendor) == ("x86_64", "AuthenticAMD")
        assert (node.family, node.model) == (175, 1)
        assert host.links[:3] == tuple(
            Link(LinkKind.NVLINK, "0000:03:00.0", target, 4, target_class=0x030200)
            for target in ("0000:82:00.0", "0000:c1:00.0", "0000:41:00.0")
        )
        cxi3 = host.ports[0]
        assert (cxi3.name, cxi3.bus_id, cxi3.number) == ("net/cxi3", "0000:01:00.0", 3)
        assert (cxi3.port, cxi3.gdr) == (1, 1)
        assert (cxi3.node, host.devices[0].node) == (UNKNOWN, 3)
        assert host.devices[0].vendor == 0x17DB

    def test_a_switch_that_a_virtual_machine_does_not_see(self):
        host = named("hgx_b200_8x_vastai_nccl2.27.3")

        assert [(link.target, link.num_links) for link in host.links] == [
            (NVSWITCH, 18)
        ] * 8
        # Of the six words, two are full, two half and two empty.
        assert len(host.numa_nodes[0].cpus) == 96

    def test_a_file_of_devices_alone(self):
        host = named("aws_p4de-24xl-topo")

        # Its comments count GPUs so, too.
        assert [(gpu.number, gpu.bus_id) for gpu in host.gpus] == [
            (2 * pair + half, f"0000:{bus}:1{'cd'[half]}.0")
            for pair, bus in enumerate(("10", "20", "90", "a0"))
            for half in (0, 1)
        ]
        assert [port.name for port in host.ports] == [
            f"net/0000:{bus}:1b.0" for bus in ("10", "20", "90", "a0")
        ]
        assert {port.number for port in host.ports} == {UNKNOWN}


class TestElements:
    def test_processors_of_two_hosts_are_two_hosts(self):
        a, b = read(
            '<system version="1">'
            '<cpu host_hash="0xa" numaid="0" affinity="1" arch="arm64">'
            f"{pci('0:1:0.0', gpu(0))}</cpu>"
            '<cpu host_hash="0xB" numaid="0" affinity="1" arch="arm64">'
            f"{pci('0:1:0.0', gpu(0))}{pci('0:2:0.0', gpu(1))}</cpu>"
            '<cpu host_hash="0xA" numaid="1" affinity="2" arch="arm64"/></system>'
        )

        assert (a.name, len(a.numa_nodes), len(a.gpus)) == ("0xa", 2, 1)
        assert (b.name, len(b.numa_nodes), len(b.gpus)) == ("0xb", 1, 2)
        assert a.sources == b.sources == ("NCCL topology file a.xml",)

    def test_a_gpu_beside_its_processor(self):
        host = on_one_node(pci("9:1:0.0", gpu(0, '<c2c bw="45000" count="10"/>')))

        # 45000 MB/s * 10 / 1000
        (link,) = host.links
        assert link == Link(LinkKind.C2C, "0009:01:00.0", "numa/0", 10, 450.0)

    def test_switches_joined_beside_the_tree(self):
        host = on_one_node(
            pci("0:1:0.0", '<pcilink target="0000:02:00.0"/>') + pci("0:2:0.0")
        )

        assert host.links == (Link(LinkKind.PCI, "0000:01:00.0", "0000:02:00.0", 1),)

    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ("0000:1B:00.0", "0000:1b:00.0"),
            ("1b:00.0", "0000:1b:00.0"),
            ("00000000:1b:00.0", "0000:1b:00.0"),
            ("10000:e1:00.1", "10000:e1:00.1"),
            ("fffffff:ffff:ff", NVSWITCH),
            ("FFFFFFF:FF:FF.0", NVSWITCH),
        ],
    )
    def test_spellings_of_addresses(self, written: str, meant: str):
        link = f'<nvlink target="{written}" count="2" tclass="0x068000"/>'
        host = on_one_node(pci("0:1:0.0", gpu(0, link)))

        assert host.links[0].target == meant

    def test_ports_that_nccl_fused_are_one(self):
        names = port("mlx5_0+mlx5_1", 0)
        parts = '<net name="mlx5_0"/><net name="mlx5_1"/><net name="mlx5_2"/>'
        host = on_one_node(pci("0:1:0.0", f"<nic>{names}{parts}</nic>"))

        assert [port.title for port in host.ports] == ["mlx5_0+mlx5_1", "mlx5_2"]

    def test_two_ports_of_one_name(self):
        nets = port("mlx5_0", 0, 'port="1"') + port("mlx5_0", 1, 'port="2"')
        host = on_one_node(pci("0:1:0.0", f"<nic>{nets}</nic>"))

        assert [(port.title, port.number) for port in host.ports] == [
            ("mlx5_0", 0),
            ("mlx5_0:2", 1),
        ]
        assert host.remarks == ()

    def test_an_adapter_for_other_things_than_messages(self):
        nets = port("a", 0, 'net="0" gin="1"') + port("b", 1, 'net="1" gin="1"')
        host = on_one_node(pci("0:1:0.0", f"<nic>{nets}</nic>"))

        assert [port.title for port in host.ports] == ["b"]

    def test_a_file_may_be_in_disorder_and_partly_reported(self):
        host = on_one_node(
            pci("0:1:0.0", pci("0:2:0.0", class_code="0x120000") + "<gpu/>")
        )

        assert [(gpu.name, gpu.number) for gpu in host.gpus] == [
            ("0000:02:00.0", 1),
            ("0000:01:00.0", 0),
        ]


class TestOddities:
    @pytest.mark.parametrize(
        ("inside", "remark"),
        [
            (pci("nonsense"), "pci has busid='nonsense', which cannot be read"),
            (pci("0:1:0.0", class_code="zz"), "pci has class='zz', which cannot be"),
            (pci("0:1:0.0", gpu(0, "<nvlink/>")), "nvlink of 0000:01:00.0 is left"),
            (pci("0:1:0.0", gpu(0, '<c2c bw="1"/>')), "c2c of 0000:01:00.0 is left"),
            (pci("0:1:0.0", gpu(0) + gpu(1)), "gpu is one more part of 0000:01:00.0"),
            (pci("0:1:0.0") * 2, "pci 0000:01:00.0 is listed again"),
            (pci("0:1:0.0", pci("0:1:0.0")), "pci has the address of another"),
            ("<nic>" + port("a", 0, 'port="9e9"') + "</nic>", "net has port='9e9'"),
        ],
    )
    def test_each_is_reported_with_its_line(self, inside: str, remark: str):
        remarks = on_one_node(inside).remarks

        assert any(each.startswith(f"Line 1: {remark}") for each in remarks), remarks

    def test_an_odd_file_is_not_reported_without_end(self):
        remarks = on_one_node(pci("odd") * 1000).remarks

        assert len(remarks) == MAX_REMARKS + 1
        assert remarks[-1] == f"More than these {MAX_REMARKS} things are odd."

    def test_devices_cannot_be_above_themselves(self):
        host = on_one_node(
            pci("0:1:0.0", pci("0:2:0.0", pci("0:1:0.0", pci("0:3:0.0"))))
        )

        assert [(d.bus_id, d.parent) for d in host.devices] == [
            ("0000:01:00.0", ""),
            ("0000:02:00.0", "0000:01:00.0"),
            ("0000:01:00.1", "0000:02:00.0"),
            ("0000:03:00.0", "0000:01:00.1"),
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("<topology/>", "the first element must be system, got topology"),
            ('<system version="1"/>', "a.xml lists no cpu"),
            ("<system>", "cannot read a.xml: not well-formed XML"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, text: str, message: str):
        with pytest.raises(UsageError, match=message):
            read(text)


class TestHarm:
    @pytest.mark.parametrize("counted", COUNTED[:1] + COUNTED[-1:], ids=str)
    def test_a_cut_sample_is_recognised_and_refused(self, counted: Counted):
        data = counted.path.read_bytes()
        begin = data.index(b"<system") + len(b"<system ")

        for end in range(begin, len(data.rstrip()), 97):
            saved = Saved("a.xml", data[:end])
            assert NCCL_TOPOLOGY.recognises(saved)
            with pytest.raises(UsageError):
                NCCL_TOPOLOGY.read(saved)

    def test_hostile_files_are_refused_or_read(self):
        good = COUNTED[0].path.read_bytes()

        assert check_harmless(read, bad_inputs(good)) > 60


NAMES = (
    *("numaid", "affinity", "busid", "class", "link_speed", "link_width", "dev"),
    *("rank", "sm", "name", "speed", "latency", "target", "count"),
)
ATTRIBUTE = st.text(
    st.characters(codec="utf-8", exclude_characters='<&"', exclude_categories=["Cc"]),
    max_size=12,
)


@given(
    st.lists(ATTRIBUTE, min_size=len(NAMES), max_size=len(NAMES)),
    st.lists(
        st.sampled_from(["pci", "gpu", "nic", "net", "nvlink", "c2c"]), max_size=6
    ),
)
def test_any_attributes_are_read_or_reported(values: list[str], tags: list[str]):
    said = " ".join(f'{n}="{v}"' for n, v in zip(NAMES, values, strict=True))
    inside = "".join(f"<{tag} {said}>" for tag in tags) + "".join(
        f"</{tag}>" for tag in reversed(tags)
    )
    (host,) = read(f'<system version="1"><cpu {said}>{inside}</cpu></system>')

    seen = {""}
    for device in host.devices:
        assert device.parent in seen
        seen.add(device.bus_id)
    assert {gpu.bus_id for gpu in host.gpus} <= seen
    assert {port.bus_id for port in host.ports} <= seen
    assert draw_log_findings([*lint_host(host), *lint_fleet([host, host])]) is not None
