import pytest
from hypothesis import given, strategies as st

from ronde.topology import (
    LOCAL_GB_PER_S,
    UNKNOWN,
    GpuDevice,
    Link,
    LinkKind,
    NetPort,
    NumaNode,
    PciDevice,
    link_gb_per_s,
    max_nvlinks,
    nvlink_gb_per_s,
    pci_gb_per_s,
    pci_theory_gb_per_s,
    port_gb_per_s,
    smp_gb_per_s,
)


class TestPci:
    # Gen3 to Gen6 at 16 lanes: what NCCL's topology files and logs show.
    @pytest.mark.parametrize(
        ("speed", "width", "gb_per_s"),
        [
            ("2.5 GT/s PCIe", 16, 3.0),
            ("5.0 GT/s PCIe", 16, 6.0),
            ("8.0 GT/s PCIe", 16, 12.0),
            ("16.0 GT/s PCIe", 16, 24.0),
            ("32.0 GT/s PCIe", 16, 48.0),
            ("64.0 GT/s PCIe", 16, 96.0),
            ("16 GT/s", 16, 24.0),
            ("2.5 GT/s", 1, 15 / 80),
        ],
    )
    def test_a_width_counts_by_the_speed_of_its_lanes(self, speed, width, gb_per_s):
        device = PciDevice("0000:01:00.0", speed=speed, width=width)
        assert pci_gb_per_s(device) == pytest.approx(gb_per_s, rel=1e-12)

    @pytest.mark.parametrize("speed", ["", "Unknown", "16.0 GT/s", "32.0 GT/s", "16"])
    def test_what_nccl_does_not_know_counts_as_gen3(self, speed):
        assert pci_gb_per_s(PciDevice("x", speed=speed, width=16)) == 12.0

    def test_a_source_that_reports_the_links_theory_counts_as_its_generation(self):
        # hwloc tells 15.753846 for Gen3 and 63.015385 for Gen5 at 16 lanes.
        assert pci_gb_per_s(PciDevice("x", gb_per_s=15.753846)) == 12.0
        assert pci_gb_per_s(PciDevice("x", gb_per_s=63.015385)) == 48.0

    # 8b/10b: 2.5 * 16 / 8 * 0.8; 128b/130b: 16 * 16 / 8 * 128 / 130; PCIe 6 has 242 of
    # 256 bytes.
    @pytest.mark.parametrize(
        ("speed", "gb_per_s"),
        [
            ("2.5 GT/s PCIe", 4.0),
            ("5.0 GT/s PCIe", 8.0),
            ("8 GT/s", 15.754),
            ("32.0 GT/s PCIe", 63.015),
            ("64.0 GT/s PCIe", 121.0),
            ("", 0.0),
        ],
    )
    def test_theory_is_what_the_encoding_leaves(self, speed, gb_per_s):
        assert pci_theory_gb_per_s(speed, 16) == pytest.approx(gb_per_s, abs=5e-4)
        assert pci_theory_gb_per_s(speed, 1) == pytest.approx(gb_per_s / 16, abs=5e-4)

    @given(st.text(max_size=20), st.integers(-2, 64))
    def test_nccl_never_counts_more_than_theory_has(self, speed, width):
        theory = pci_theory_gb_per_s(speed, width)
        device = PciDevice("x", speed=speed, width=width)
        assert theory == 0 or pci_gb_per_s(device) <= theory * 1.0001


class TestGpuLinks:
    @pytest.mark.parametrize(
        ("sm", "gb_per_s", "most"),
        [
            (60, 18.0, 4),
            (70, 20.0, 6),
            (80, 20.0, 12),
            (90, 20.6, 18),
            (UNKNOWN, 20.0, 0),
        ],
    )
    def test_figures_of_one_nvlink(self, sm, gb_per_s, most):
        assert nvlink_gb_per_s(sm) == gb_per_s
        assert max_nvlinks(sm) == most

    def test_links_count_together(self):
        gpu = GpuDevice("a", 0, sm=90)
        link = Link(LinkKind.NVLINK, "a", "b", 18, gb_per_s=450.0)
        assert link_gb_per_s(link, gpu) == pytest.approx(370.8)
        amd = GpuDevice("a", 0, sm=94, gcn="942")
        assert link_gb_per_s(Link(LinkKind.XGMI, "a", "b", 1), amd) == 48.0

    def test_what_a_source_reports_counts_where_the_gpu_is_not_known(self):
        gpu = GpuDevice("a", 0)
        assert link_gb_per_s(Link(LinkKind.NVLINK, "a", "b", 2, 40.0), gpu) == 40.0
        assert link_gb_per_s(Link(LinkKind.NVLINK, "a", "b", 2), gpu) == 40.0
        assert link_gb_per_s(Link(LinkKind.NVLINK, "a", "b", UNKNOWN, 7.0), gpu) == 7.0
        assert link_gb_per_s(Link(LinkKind.NVLINK, "a", "b", UNKNOWN), gpu) == 0.0


INTEL = NumaNode(0, arch="x86_64", vendor="GenuineIntel", family=6)
AMD = NumaNode(0, arch="x86_64", vendor="AuthenticAMD", family=175, model=1)


class TestProcessors:
    @pytest.mark.parametrize(
        ("node", "gb_per_s"),
        [
            (INTEL._replace(model=207), 40.0),
            (INTEL._replace(model=0xCE), 22.0),
            (INTEL._replace(model=0x8E), 10.0),
            (INTEL._replace(family=15, model=207), 6.0),
            (AMD, 16.0),
            (NumaNode(0, arch="ppc64"), 32.0),
            (
                NumaNode(0, arch="x86_64", vendor="  Shanghai  ", family=7, model=0x5B),
                9.0,
            ),
            (NumaNode(0), LOCAL_GB_PER_S),
            (NumaNode(0, arch="x86_64"), LOCAL_GB_PER_S),
        ],
    )
    def test_figures_between_two(self, node, gb_per_s):
        assert smp_gb_per_s(node, node._replace(number=1)) == gb_per_s


class TestPorts:
    @pytest.mark.parametrize(
        ("mbit_per_s", "gb_per_s"),
        [(200000, 25.0), (400000, 50.0), (1000, 0.125), (0, 1.25), (-1, 1.25)],
    )
    def test_megabits_are_bytes_and_none_is_10_gigabits(self, mbit_per_s, gb_per_s):
        assert port_gb_per_s(NetPort("eth0", mbit_per_s=mbit_per_s)) == gb_per_s
