"""From real machines' files, and some made by hand, to what their links carry."""

from pathlib import Path

import pytest

from ronde.topology import (
    NCCL_TOPOLOGY,
    NVSWITCH,
    GpuDevice,
    HostTopology,
    Limit,
    LimitWorld,
    Link,
    LinkKind,
    NetPort,
    PciDevice,
    Saved,
    bound_of,
    world_of,
)

SAMPLES = Path(__file__).parent / "samples"
GEN3, GEN4, GEN5 = (f"{rate} GT/s PCIe" for rate in ("8.0", "16.0", "32.0"))
# GB/s of x16, of which 128 of 130 bits are data.
GEN3_X16, GEN4_X16, GEN5_X16 = (rate * 2 * 128 / 130 for rate in (8, 16, 32))


def host_of(name: str) -> HostTopology:
    (path,) = SAMPLES.glob(f"*_topo/{name}*.xml")
    (host,) = NCCL_TOPOLOGY.read(Saved(name, path.read_bytes())).hosts
    return host


def limit(world: LimitWorld, collective: str = "all_reduce") -> Limit:
    found = bound_of(world, collective).limit
    assert found is not None
    return found


# As the files tell: adapters and their Mbit/s, NVLinks of a GPU, links of the bus.
@pytest.mark.parametrize(
    ("name", "network", "nccl_network", "gpu", "nccl_gpu"),
    [
        # 4 x 200G on PCIe 4 x16, which NCCL counts as 24 GB/s; 12 links of A100.
        ("perlmutter", 4 * 25, 4 * 24, 12 * 25, 12 * 20),
        # 16 x 180000 Mbit/s; 18 links of H100.
        ("oci_H100", 16 * 22.5, 16 * 22.5, 18 * 25, 18 * 20.6),
        # 5 ports behind one host bridge, 4 behind each of two; 18 links of B200, though
        # the file counts 126.
        ("modal", 4 * 12.5 + 25 + 8 * 50, 3 * 48, 18 * 50, 18 * 40.1),
        # 2 of 3 adapters share a switch's link of PCIe 4 x16.
        ("topo_8p_ts1", GEN4_X16 + 25, 24 + 24, None, None),
        # 200000000 Mbit/s is what the file says; PCIe 4 x16 is what there is.
        ("topo_4p_942", 4 * GEN4_X16, 4 * 24, 3 * 64, 3 * 48),
    ],
)
def test_samples(
    name: str,
    network: float,
    nccl_network: float,
    gpu: float | None,
    nccl_gpu: float | None,
) -> None:
    host = host_of(name)
    world = world_of(host, 2, len(host.gpus))
    assert world.network is not None
    assert world.network[1:3] == pytest.approx((network, nccl_network))
    found = world.gpu[1:3] if world.gpu else (None, None)
    assert found == pytest.approx((gpu, nccl_gpu))
    assert world.unknown == ()


def test_files_that_do_not_report() -> None:
    clouds = world_of(host_of("azure_ndv5"), 2, 8)
    assert clouds.network is not None
    assert clouds.network.gb_per_s == pytest.approx(8 * GEN5_X16)
    assert clouds.unknown == (
        "speed of 8 ports from 0101:00:00.0 unknown: its PCIe link counts",
        "the source does not show whether NVLink joins the GPUs",
    )
    # eth0 hangs at no device: what a machine's software says is no rate.
    b200 = world_of(host_of("hgx_b200"), 2, 8)
    assert b200.network is None
    assert "--link-rate" in b200.unknown[0]


def test_amd_has_no_nvls_and_islands_of_four() -> None:
    world = world_of(host_of("topo_8p_4nics"), 1, 8)
    assert not world.has_nvls
    assert world.islands is not None
    assert world.islands.num_gpus == 4
    assert world.islands.way_out.gb_per_s == pytest.approx(4 * GEN4_X16)
    # Two islands: each gets what the other has, 4 * 31.5 * 2/1 * 7/8.
    assert limit(world).bus_bandwidth_gb_per_s == pytest.approx(4 * GEN4_X16 * 7 / 4)


def device(bus_id: str, parent: str = "", speed: str = GEN4) -> PciDevice:
    return PciDevice(bus_id, parent, speed=speed, width=16)


def port(bus_id: str, mbit_per_s: int = 400_000, **changes: object) -> NetPort:
    plain = NetPort(f"nic{bus_id[5:7]}", bus_id, mbit_per_s=mbit_per_s)
    return plain._replace(**changes)


def total(*ports: NetPort, devices: tuple[PciDevice, ...], gpu: str = "") -> float:
    gpus = (GpuDevice(gpu, 0),) if gpu else ()
    host = HostTopology(devices=devices, gpus=gpus, ports=ports)
    network = world_of(host, 2, 1).network
    return 0 if network is None else network.gb_per_s


def test_an_adapter_is_no_faster_than_its_link() -> None:
    """400G on PCIe 4 x16: 31.5 of 50 GB/s, of which NCCL counts on 24."""
    nic = "0000:10:00.0"
    host = HostTopology(devices=(device(nic),), ports=(port(nic),))
    network = world_of(host, 2, 1).network
    assert network is not None
    assert network.gb_per_s == pytest.approx(31.5, abs=0.01)
    assert network.practical_gb_per_s == 24
    assert network.link == "nic10, 31.51 GB/s (PCIe lets through no more of 50)"


def test_adapters_share_what_lies_above_them() -> None:
    switch = device("0000:01:00.0", speed=GEN3)
    nics = [device(f"0000:{n}:00.0", "0000:01:00.0", GEN5) for n in (10, 20)]
    ports = [port(nic.bus_id) for nic in nics]
    assert total(*ports, devices=(switch, *nics)) == pytest.approx(GEN3_X16)
    # A GPU below the switch takes the bytes before they come to its uplink.
    gpu = device("0000:30:00.0", "0000:01:00.0", GEN5)
    assert total(*ports, devices=(switch, *nics, gpu), gpu=gpu.bus_id) == 100
    # One that hangs elsewhere does not.
    gpu = device("0000:30:00.0")
    devices = (switch, *nics, gpu)
    assert total(*ports, devices=devices, gpu=gpu.bus_id) == pytest.approx(GEN3_X16)


def test_functions_of_a_device_share_its_link() -> None:
    nics = (device("0000:10:00.0"), device("0000:10:00.1"))
    ports = [port(nic.bus_id, 200_000) for nic in nics]
    assert total(*ports, devices=nics) == pytest.approx(GEN4_X16)
    apart = (device("0000:10:00.0"), device("0000:11:00.0"))
    ports = [port(nic.bus_id, 200_000) for nic in apart]
    assert total(*ports, devices=apart) == 50


def test_which_ports_count() -> None:
    nics = tuple(device(f"0000:{n}:00.0") for n in (10, 20, 30))
    first, second, third = (port(nic.bus_id, 25_000) for nic in nics)
    assert total(first, second, third, devices=nics) == 3 * 3.125
    down = third._replace(is_up=False)
    assert total(first, second, down, devices=nics) == 2 * 3.125
    rdma = first._replace(kind="infiniband")
    assert total(rdma, second, third, devices=nics) == 3.125
    assert total(port("", 10_000), devices=nics) == 0


def test_the_least_link_that_there_is_limits_nothing() -> None:
    bridge = PciDevice("0000:01:00.0", speed="2.5 GT/s PCIe", width=1)
    nic = device("0000:10:00.0", bridge.bus_id)
    host = HostTopology(devices=(bridge, nic), ports=(port(nic.bus_id, 100_000),))
    network = world_of(host, 2, 1).network
    assert network is not None
    # NCCL believes it.
    assert network[:3] == ("nic10, 12.5 GB/s", 12.5, 15 / 80)
    tiny = bridge._replace(bus_id="0000:10:00.0")
    plain = gpus()
    host = plain._replace(devices=(tiny, *plain.devices[1:]))
    assert world_of(host, 1, 4).unknown == (
        "the source does not show the PCIe link of a GPU",
    )


def test_the_kernel_alone_reports_nothing_of_nvlinks() -> None:
    kernel = gpus()._replace(sources=("sysfs of this machine",))
    assert world_of(kernel, 1, 4).unknown == (
        "the source does not show whether NVLink joins the GPUs",
    )
    both = kernel._replace(sources=("sysfs of this machine", "NVML"))
    assert limit(world_of(both, 1, 4)).link == "PCIe, 31.51 GB/s a GPU"


def gpus(*links: tuple[int, str], sm: int = 80) -> HostTopology:
    """Return as many A100 on PCIe 4 as links are given: from which, and to what."""
    names = [f"0000:{n}0:00.0" for n in range(1, 5)]
    return HostTopology(
        devices=tuple(device(name) for name in names),
        gpus=tuple(GpuDevice(name, n, sm=sm) for n, name in enumerate(names)),
        links=tuple(Link(LinkKind.NVLINK, names[n], to, 4) for n, to in links),
    )


def test_without_nvlink_pcie_counts() -> None:
    world = world_of(gpus(), 1, 4)
    assert limit(world).bus_bandwidth_gb_per_s == pytest.approx(GEN4_X16)
    assert limit(world).practical_gb_per_s == 24
    assert limit(world).link == "PCIe, 31.51 GB/s a GPU"


def test_a_gpu_without_its_nvlinks_slows_all() -> None:
    all_but_one = [(n, NVSWITCH) for n in range(3)]
    assert limit(world_of(gpus(*all_but_one), 1, 4)).link.startswith("PCIe")
    assert limit(world_of(gpus(*all_but_one), 1, 3)).link.startswith("4 NVLinks, 100 ")
    # One that points at itself leads nowhere.
    to_itself = [*all_but_one, (3, "0000:40:00.0")]
    assert limit(world_of(gpus(*to_itself), 1, 4)).link.startswith("PCIe")


def test_links_reported_at_one_end_join_both() -> None:
    pairs = gpus((0, "0000:20:00.0"), (3, "0000:30:00.0"))
    world = world_of(pairs, 1, 4)
    assert world.islands is not None
    assert world.islands.num_gpus == 2
    assert limit(world).bus_bandwidth_gb_per_s == pytest.approx(GEN4_X16 * 3)
    assert limit(world_of(pairs, 1, 2)).bus_bandwidth_gb_per_s == 4 * 25
    chain = gpus((0, "0000:20:00.0"), (1, "0000:30:00.0"), (2, "0000:40:00.0"))
    assert limit(world_of(chain, 1, 4)).link == "4 NVLinks, 100 GB/s a GPU"


def test_what_is_not_known_is_said() -> None:
    assert "memory" in world_of(HostTopology(), 1, 2).unknown[0]
    assert world_of(gpus(), 1, 8).unknown == ("8 ranks share 4 GPUs",)
    unknown_gpu = gpus(*((n, NVSWITCH) for n in range(4)), sm=-1)
    assert "how fast" in world_of(unknown_gpu, 1, 4).unknown[0]
    three_and_one = gpus((0, "0000:20:00.0"), (1, "0000:30:00.0"))
    assert limit(world_of(three_and_one, 1, 4)).link.startswith("PCIe")
