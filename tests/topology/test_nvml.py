"""What NVML says becomes a graph, and that it says nothing is no error."""

import inspect
import re
import sys
from collections import Counter
from itertools import permutations
from pathlib import Path

import pytest

from ronde.render import draw_tree
from ronde.topology import (
    NCCL_TOPOLOGY,
    NVSWITCH,
    UNKNOWN,
    ComparedHost,
    GpuAnswers,
    HostTopology,
    LimitWorld,
    Link,
    LinkKind,
    NoNvmlError,
    RankLayout,
    Rate,
    Relation,
    Remote,
    Saved,
    Topology,
    graph_of,
    open_nvml,
    payload_gb_per_s,
    read_nvml,
    with_gpus,
)

SAMPLES = Path(__file__).parent / "samples"
HAS_DRIVER = Path("/proc/driver/nvidia").exists()
GPU, SWITCH, NOBODY = 0, 2, 255


def test_a_module_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    host, (notice,) = read_nvml()
    assert host is None
    assert notice.startswith("NVML needs nvidia-ml-py: pip install")


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver of NVIDIA's")
def test_a_driver_that_is_not_there_is_one_line():
    pytest.importorskip("pynvml")
    host, (notice,) = read_nvml()
    assert host is None
    assert notice.startswith("NVML does not answer: ")
    with pytest.raises(NoNvmlError), open_nvml():
        pytest.fail("it was opened")


@pytest.mark.skipif(not HAS_DRIVER, reason="there is no driver of NVIDIA's")
def test_a_driver_reports_its_gpus():
    host, notices = read_nvml()
    assert host is not None
    assert notices == ()
    for gpu in host.gpus:
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:00\.0", gpu.bus_id)
        assert gpu.uuid.startswith("GPU-")
        assert gpu.sm >= 50


def test_all_that_is_asked_exists():
    pynvml = pytest.importorskip("pynvml")
    source = Path(inspect.getfile(read_nvml)).read_text()
    asked = re.findall(r'nvml\.(\w+)|"(nvml\w+)"', source)
    names = {one or other for one, other in asked}
    assert len(names) > 12
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_links_are_those_of_the_file_that_nccl_wrote_there():
    path = SAMPLES / "nccl_topo" / "perlmutter_a100_4x_slingshot_nccl2.29.7.xml"
    (reported,) = NCCL_TOPOLOGY.read(Saved(path.name, path.read_bytes())).hosts
    addresses = [gpu.bus_id for gpu in reported.gpus]
    gpus = [
        GpuAnswers(
            # NVML writes the domain with eight digits, and capital letters.
            address=f"0000{address}".upper(),
            sm=80,
            nvlinks=tuple(
                Remote(GPU, f"0000{other}".upper())
                for _ in range(4)
                for other in addresses
                if other != address
            ),
        )
        for address in addresses
    ]
    host = graph_of(gpus, {})
    assert Counter(host.links) == Counter(reported.links)
    assert len(host.links) == 12
    assert [gpu.bus_id for gpu in host.gpus] == addresses


@pytest.mark.parametrize("address", ["", "FFFFFFFF:FF:FF.0", "0FFFFFFF:FF:FF.0"])
def test_switches_that_cannot_be_seen_are_one(address):
    gpu = GpuAnswers("00000000:1B:00.0", nvlinks=(Remote(SWITCH, address),) * 18)
    (link,) = graph_of([gpu], {}).links
    assert link == Link(
        LinkKind.NVLINK, "0000:1b:00.0", NVSWITCH, 18, target_class=0x068000
    )


def test_switches_that_can_be_seen_are_distinguished():
    remotes = [Remote(SWITCH, f"00000000:C{n}:00.0") for n in (4, 5, 4, 5, 6, 6)]
    gpu = GpuAnswers("00000000:1B:00.0", nvlinks=tuple(remotes))
    links = graph_of([gpu], {}).links
    assert [(link.target, link.num_links) for link in links] == [
        ("0000:c4:00.0", 2),
        ("0000:c5:00.0", 2),
        ("0000:c6:00.0", 2),
    ]


@pytest.mark.parametrize(
    ("signalled", "carried"),
    [(20000, 20), (25781.25, 25), (26562.5, 25), (53125, 50), (UNKNOWN, 0)],
)
def test_nvlinks_spend_a_part_on_coding(signalled, carried):
    assert payload_gb_per_s(signalled) == pytest.approx(carried)


def way_out(host: HostTopology) -> Rate:
    rate = with_gpus(LimitWorld(RankLayout(1, 1, 1)), host, host.gpus).gpu
    assert rate is not None
    return rate


def test_links_carry_what_their_signalling_leaves_and_count_as_nccl_does():
    links = (Remote(SWITCH, ""),) * 18
    gpu = GpuAnswers("00000000:1B:00.0", sm=90, nvlinks=links, nvlink_mb_per_s=26562)
    host = graph_of([gpu], {})
    assert [link.gb_per_s for link in host.links] == [pytest.approx(450, abs=0.02)]
    rate = way_out(host)
    assert rate.link == "18 NVLinks, 450 GB/s a GPU"
    assert rate.practical_gb_per_s == 18 * 20.6
    assert "18 to NVSwitch, 370.8 GB/s" in draw_tree(Topology((host,)))
    facts = ComparedHost(host).of(host.gpus[0])
    assert facts["GPU links"].gb_per_s == 18 * 20.6
    # A faster one than any that is listed is as fast as it says.
    faster = graph_of([gpu._replace(nvlink_mb_per_s=106250)], {})
    assert way_out(faster).gb_per_s == 1800


def test_links_to_nobody_knows_where_are_a_remark():
    gpu = GpuAnswers("00000000:1B:00.0", nvlinks=(Remote(NOBODY, ""),) * 4)
    host = graph_of([gpu], {})
    assert host.links == ()
    assert host.remarks == ("NVML does not show where 4 NVLinks of 0000:1b:00.0 lead.",)


def test_links_to_the_processor_add_up():
    gpu = GpuAnswers("00000009:01:00.0", node=0, c2c_mb_per_s=(44712,) * 10)
    (link,) = graph_of([gpu], {}).links
    assert link == Link(LinkKind.C2C, "0009:01:00.0", "numa/0", 10, 447.12)


def test_access_to_memory_is_reported_in_nvidia_smis_words():
    addresses = ["00000000:1B:00.0", "00000000:43:00.0"]
    peers = dict.fromkeys(permutations(range(2), 2), 0) | {(1, 0): 5}
    host = graph_of([GpuAnswers(address) for address in addresses], peers)
    assert host.relations == (
        Relation("0000:1b:00.0", "0000:43:00.0", peer="OK"),
        Relation("0000:43:00.0", "0000:1b:00.0", peer="NS"),
    )
    assert graph_of([GpuAnswers(a) for a in addresses], {(0, 1): -1}).relations == ()
