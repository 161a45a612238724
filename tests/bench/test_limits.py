"""Limits of busbw: what sysfs tells, and what is found here."""

import os
from pathlib import Path

import pytest
import torch

from ronde.bench.gpu_links import (
    GpuLinks,
    payload_gb_per_s,
    read_gpu_links,
)
from ronde.bench.limits import Found, Wires, search_limit
from ronde.bench.links import (
    Link,
    ethernet_link,
    infiniband_links,
    interface_of,
    join_links,
    name_links,
    node_rate,
    pci_rates,
)
from ronde.bench.memory_bandwidth import (
    buffer_bytes,
    cache_bytes,
    copy_gb_per_s,
    measure_memory,
)
from ronde.collectives import Communicator
from ronde.topology.limits.limit import Limit
from ronde.topology.limits.world import Rate
from ronde.topology.probes.nvml import NoNvmlError

CPU = torch.device("cpu")


class Sysfs:
    """A directory that looks like another machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def add_interface(
        self, name: str, speed: str | None, bus: str = "pci0000:00/0000:00:03.0"
    ) -> None:
        folder = f"sys/devices/{bus}/net/{name}"
        self.write(f"{folder}/operstate", "up")
        if speed is not None:
            self.write(f"{folder}/speed", speed)
        links = self.root / "sys/class/net"
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(os.path.relpath(self.root / folder, links))
        if not bus.startswith("virtual"):
            (self.root / folder / "device").symlink_to("../..")

    def add_virtual(self, name: str, *lower: str) -> None:
        self.add_interface(name, "10000", "virtual")
        folder = self.root / "sys/devices/virtual/net" / name
        for each in lower:
            (folder / f"lower_{each}").symlink_to(self.root / "sys/class/net" / each)

    def add_adapter(self, name: str, rate: str, state: str, bus: str) -> None:
        folder = f"sys/devices/{bus}/infiniband/{name}"
        self.write(f"{folder}/ports/1/rate", rate)
        self.write(f"{folder}/ports/1/state", state)
        (self.root / folder / "device").symlink_to("../..")
        links = self.root / "sys/class/infiniband"
        links.mkdir(parents=True, exist_ok=True)
        (links / name).symlink_to(os.path.relpath(self.root / folder, links))


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def test_an_ethernet_interface(sysfs: Sysfs) -> None:
    sysfs.add_interface("eth0", "25000")
    assert ethernet_link("eth0", sysfs.root) == Link("eth0", 3.125)


@pytest.mark.parametrize("speed", ["-1", "0", "", None, "unknown"])
def test_an_interface_that_does_not_tell(sysfs: Sysfs, speed: str | None) -> None:
    sysfs.add_interface("eth0", speed)
    assert ethernet_link("eth0", sysfs.root) is None
    assert ethernet_link("eth7", sysfs.root) is None


def test_what_is_virtual_is_no_hardware(sysfs: Sysfs) -> None:
    for name in ("lo", "veth12", "docker0"):
        sysfs.add_virtual(name)
        assert ethernet_link(name, sysfs.root) is None


def test_what_lies_below_a_virtual_interface(sysfs: Sysfs) -> None:
    sysfs.add_interface("eth0", "25000")
    sysfs.add_interface("eth1", "25000", "pci0000:00/0000:00:04.0")
    sysfs.add_virtual("veth1")
    sysfs.add_virtual("br0", "eth0", "veth1")
    assert ethernet_link("br0", sysfs.root) == Link("br0 over eth0", 3.125)
    sysfs.add_virtual("bond0", "eth0", "eth1")
    bonding = "sys/devices/virtual/net/bond0/bonding/mode"
    sysfs.write(bonding, "802.3ad 4")
    assert ethernet_link("bond0", sysfs.root) == Link("bond0 over eth0+eth1", 6.25)
    sysfs.write(bonding, "active-backup 1")
    assert ethernet_link("bond0", sysfs.root) == Link("bond0 over eth0+eth1", 3.125)
    sysfs.add_virtual("vlan9", "bond0")
    assert ethernet_link("vlan9", sysfs.root) is not None


def test_infiniband_ports_that_are_up(sysfs: Sysfs) -> None:
    sysfs.add_adapter("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE", "pci0/0000:0f:00.0")
    sysfs.add_adapter("mlx5_1", "56 Gb/sec (4X FDR)", "4: ACTIVE", "pci0/0000:1f:00.0")
    sysfs.add_adapter("mlx5_2", "10 Gb/sec (4X SDR)", "1: DOWN", "pci0/0000:2f:00.0")
    links = infiniband_links(sysfs.root)
    assert links == [Link("mlx5_0:1", 50.0), Link("mlx5_1:1", 7.0)]
    assert node_rate(links) == 57.0
    assert name_links(links) == "mlx5_0:1+mlx5_1:1, 57 GB/s"
    assert name_links(links * 4) == "8 ports from mlx5_0:1, 228 GB/s"


def test_a_port_is_no_faster_than_its_pcie_link(sysfs: Sysfs) -> None:
    bus = "pci0/0000:0e:00.0/0000:0f:00.0"
    sysfs.add_adapter("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE", bus)
    for folder, speed in ((bus, "32.0"), (str(Path(bus).parent), "16.0")):
        sysfs.write(f"sys/devices/{folder}/max_link_speed", f"{speed} GT/s PCIe")
        sysfs.write(f"sys/devices/{folder}/max_link_width", "16")
    (link,) = infiniband_links(sysfs.root)
    assert link.gb_per_s == pytest.approx(31.5, abs=0.02)
    assert link.practical_gb_per_s == 24  # NCCL's figure for x16 of PCIe 4
    assert join_links([link, Link("eth0", 1.0)])[1:3] == (link.gb_per_s + 1, 25)
    assert link.bottleneck == "its PCIe link: 31.51 of 50 GB/s"
    assert name_links([link]).endswith("(its PCIe link: 31.51 of 50 GB/s)")


@pytest.mark.parametrize(
    ("speed", "width", "gb_per_s"),
    [
        ("8.0 GT/s PCIe", "16", 15.75),
        ("16.0 GT/s", "16", 31.5),
        ("32.0 GT/s PCIe", "16", 63),
        ("64.0 GT/s PCIe", "16", 121),
        ("2.5 GT/s PCIe", "1", 0.25),
        ("Unknown", "16", None),
        ("16.0 GT/s PCIe", "0", None),
        ("16.0 GT/s PCIe", "255", None),
    ],
)
def test_pcie_links(
    sysfs: Sysfs, speed: str, width: str, gb_per_s: float | None
) -> None:
    sysfs.write("device/max_link_speed", speed)
    sysfs.write("device/max_link_width", width)
    rates = pci_rates(sysfs.root / "device")
    found = None if rates is None else rates[0]
    assert found == (None if gb_per_s is None else pytest.approx(gb_per_s, abs=0.06))


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""  # reserved for documents
    assert ethernet_link("lo") is None


@pytest.mark.parametrize(
    ("signalled", "carried"),
    [(20000, 20), (25781.25, 25), (26562.5, 25), (53125, 50)],
)
def test_nvlinks_spend_a_part_on_coding(signalled: float, carried: float) -> None:
    assert payload_gb_per_s(signalled) == pytest.approx(carried)


def test_the_way_from_a_gpu_to_the_others() -> None:
    h100 = GpuLinks("GPU-1", "H100", 450.0, 18, 5, 16, 90)
    assert h100.rate == Rate("18 NVLinks, 450 GB/s a GPU", 450.0, 18 * 20.6)
    assert h100.has_nvls
    l4 = GpuLinks("GPU-2", "L4", 0.0, 0, 4, 16, 89)
    assert l4.rate is not None
    assert l4.rate.link == "PCIe, 31.51 GB/s a GPU"
    assert l4.rate.practical_gb_per_s == 24.0
    assert not l4.has_nvls
    assert GpuLinks("GPU-3", "vGPU", 0.0, 0, 0, 0, 90).rate is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_tells_no_links() -> None:
    with pytest.raises(NoNvmlError, match="NVML"):
        read_gpu_links("00000000-0000-0000-0000-000000000000", 90)


def test_the_last_level_cache(sysfs: Sysfs) -> None:
    for cpu in range(4):
        for index, (level, size, shared) in enumerate(
            [("1", "48K", cpu), ("2", "2048K", cpu), ("3", "32M", cpu // 2)]
        ):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            sysfs.write(f"{folder}/level", level)
            sysfs.write(f"{folder}/size", size)
            sysfs.write(f"{folder}/shared_cpu_list", str(shared))
    assert cache_bytes(sysfs.root) == 2 * 32 << 20
    assert cache_bytes(sysfs.root / "nowhere") == 0


def test_buffers_are_beyond_the_cache_within_an_eighth_of_memory() -> None:
    gib = 1 << 30
    assert 2 * 2 * buffer_bytes(64 << 20, 100 * gib, 2) == 128 << 20
    assert 2 * 8 * buffer_bytes(480 << 20, 100 * gib, 8) == 960 << 20
    assert 2 * 2 * buffer_bytes(480 << 20, gib, 2) == gib // 8
    assert 2 * 2 * buffer_bytes(100 * gib, 100 * gib, 2) == gib
    assert buffer_bytes(0, 0, 64) == 4096


def test_a_copy_reads_and_writes() -> None:
    source, target = torch.ones(1000, dtype=torch.uint8), torch.zeros(1000).byte()
    times_ns = iter([0, 50_000_000, 100_000_000])
    rate = copy_gb_per_s(source, target, lambda: next(times_ns))
    assert rate == 2 * 2 * 1000 / 100_000_000
    assert torch.equal(source, target)


def _search(
    communicator: Communicator, hosts: list[str], wires: Wires, test: str
) -> Found:
    return search_limit(test, communicator, hosts, CPU, wires)


def test_memory_limits_the_ranks_of_one_host(run_ranks) -> None:
    found = run_ranks(2, _search, ["a", "a"], Wires(), "all_reduce")
    assert found[0] == found[1]
    limit = found[0].limit
    assert limit.link.startswith("memory, ")
    assert "the cache may exceed it" in limit.note
    measured = float(limit.link.split()[1])
    assert limit.bus_bandwidth_gb_per_s == pytest.approx(measured / 4, rel=1e-3)
    assert 0.5 < measured < 2000


def test_the_network_limits_several_hosts(run_ranks) -> None:
    wires = Wires(gb_per_s=0.125)
    found = run_ranks(3, _search, ["a", "b", "a"], wires, "all_reduce")
    assert found == found[:1] * 3
    # 0.125 * 2/1 * 2/3
    assert found[0].limit == Limit(pytest.approx(1 / 6), "as given, 0.125 GB/s", "")


def test_memory_binds_where_the_network_is_faster(run_ranks) -> None:
    hosts = ["a", "b", "a"]
    found = run_ranks(3, _search, hosts, Wires(gb_per_s=1e6), "broadcast")
    assert found[0].limit.link.startswith("memory, ")


def test_a_link_that_does_not_tell_is_no_limit(run_ranks) -> None:
    found = run_ranks(2, _search, ["a", "b"], Wires(interface="lo"), "all_reduce")
    assert found[0].limit is None
    assert found[0].reason == (
        "the link rate is not known: lo is virtual or does not tell its speed; "
        "--link-rate gives it"
    )


def test_one_rank_has_no_limit(run_ranks) -> None:
    def alone(communicator: Communicator) -> Limit | None:
        return search_limit("all_reduce", communicator, ["a"], CPU).limit

    assert run_ranks(1, alone) == [None]


def test_memory_is_measured_by_host(run_ranks) -> None:
    def measure(communicator: Communicator) -> dict[str, float]:
        host = "ab"[communicator.rank % 2]
        return measure_memory(communicator, host).gb_per_s

    found = run_ranks(3, measure)
    assert found == found[:1] * 3
    assert set(found[0]) == {"a", "b"}
