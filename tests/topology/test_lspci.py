"""lspci's list becomes devices; with -vv also a tree, links, NUMA nodes and ACS."""

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.topology.hostile import bad_inputs, check_harmless

from ronde.errors import UsageError
from ronde.render import draw_tree
from ronde.topology import (
    LSPCI,
    UNKNOWN,
    HostTopology,
    Saved,
    Topology,
    compare_hosts,
    compute_capability,
    lint_host,
    read_topology,
    write_topology,
)

SAMPLES = Path(__file__).parent / "samples" / "sysfs_snapshots"
A10, A100 = SAMPLES / "gpud_lspci.nn.a10", SAMPLES / "gpud_lspci.nn.a100"
PROBE = LSPCI


def read(data: bytes | str) -> HostTopology:
    data = data.encode() if isinstance(data, str) else data
    (host,) = PROBE.read(Saved("lspci.txt", data)).hosts
    return host


@pytest.mark.parametrize("path", [A10, A100], ids=lambda path: path.name)
def test_samples_are_recognised_and_go_through_json(path):
    saved = Saved(path.name, path.read_bytes())
    assert PROBE.recognises(saved)
    topology = PROBE.read(saved)
    assert topology.hosts[0].sources == (f"lspci {path.name}",)
    assert read_topology(write_topology(topology).encode(), "it") == topology


def test_a_hypervisor_s_eight_gpus():
    host = read(A100.read_bytes())
    # grep -c of [0302], [0680], [0207] and [0200].
    assert Counter(device.class_code for device in host.devices) == {
        0x030200: 8,
        0x068000: 6,
        0x020700: 8,
        0x020000: 1,
    }
    assert [gpu.bus_id[:4] for gpu in host.gpus] == [
        *("0001", "0002", "0003", "0004", "000b", "000c", "000d", "000e")
    ]
    assert [gpu.number for gpu in host.gpus] == list(range(8))
    assert {gpu.sm for gpu in host.gpus} == {80}
    assert {gpu.title for gpu in host.gpus} == {
        "NVIDIA Corporation GA100 [A100 SXM4 80GB]"
    }
    assert Counter(port.kind for port in host.ports) == {"infiniband": 8, "": 1}
    adapter = next(each for each in host.devices if each.bus_id == "0101:00:00.0")
    assert (adapter.vendor, adapter.device) == (0x15B3, 0x101C)
    assert (adapter.parent, adapter.node) == ("", UNKNOWN)


def test_ids_are_in_the_last_brackets():
    host = read(
        "17:00.0 Ethernet controller [0200]: A [b: c] [1234:5678] mode "
        "[15b3:101d] (rev 01) (prog-if 00 [x])\n"
        "\tSubsystem: Mellanox [15b3:0040]\n"
        "\tKernel driver in use: mlx5_core\n"
        "\n"
        "10000:e1:00.0 3D controller [0302]: NVIDIA Corporation GH100 "
        "[H100 SXM5 80GB] [10de:2330] (rev a1)\n"
    )
    adapter, gpu = host.devices
    assert (adapter.vendor, adapter.device) == (0x15B3, 0x101D)
    assert (gpu.bus_id, gpu.device) == ("10000:e1:00.0", 0x2330)
    assert host.gpus[0].sm == 90


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n00:02.0 PCI bridge [0604]: Red Hat [1b36:", "line 2: a device must have"),
        (
            "00:02.0 x [0604]: x [1b36:000c]\n0000:00:02.0 x [0604]: x [1b36:000c]",
            "line 2: a device must be listed once",
        ),
        ("", "lists no PCI devices"),
        ("GPU0\n", "lists no PCI devices"),
    ],
)
def test_other_lists_are_refused(text, message):
    with pytest.raises(UsageError, match=f"lspci.txt.* {message}"):
        read(text)


def test_other_lines_are_not_recognised():
    assert not PROBE.recognises(Saved("it", b"GPU0\tX\n12:30.5\n"))


# What lspci -nnvvv prints for a root port, both sorts of ports of a switch, a GPU and
# an adapter below them; and for what a healthy server has for its management.
DETAILS = """\
16:02.0 PCI bridge [0604]: Intel Corporation Device [8086:347a] (rev 06)
\tNUMA node: 0
\tBus: primary=16, secondary=17, subordinate=1b, sec-latency=0
\tCapabilities: [40] Express (v2) Root Port (Slot+), MSI 00
\t\tLnkCap:\tPort #5, Speed 16GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 16GT/s (ok), Width x16 (ok)
\tCapabilities: [220 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+

17:00.0 PCI bridge [0604]: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030]
\tNUMA node: 0
\tBus: primary=17, secondary=18, subordinate=1b, sec-latency=0
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <32us
\t\tLnkSta:\tSpeed 16GT/s, Width x16
18:00.0 PCI bridge [0604]: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030]
\tBus: primary=18, secondary=19, subordinate=19, sec-latency=0
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <32us
\t\tLnkSta:\tSpeed 16GT/s, Width x8
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl-
18:01.0 PCI bridge [0604]: Broadcom / LSI PEX890xx PCIe Gen 5 Switch [1000:c030]
\tBus: primary=18, secondary=1a, subordinate=1a, sec-latency=0
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <32us
\t\tLnkSta:\tSpeed 16GT/s, Width x16
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl-
19:00.0 3D controller [0302]: NVIDIA Corporation GA100 [A100 SXM4 80GB] [10de:20b2]
\tSubsystem: NVIDIA Corporation Device [10de:1463]
\tNUMA node: 0
\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM not supported
\t\tLnkCap2: Supported Link Speeds: 2.5-16GT/s, Crosslink- Retimer+
\t\tLnkSta:\tSpeed 16GT/s, Width x8 (downgraded)
1a:00.0 Infiniband controller [0207]: Mellanox MT28908 [ConnectX-6] [15b3:101b]
\tNUMA node: 0
\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 16GT/s (ok), Width x16 (ok)
00:1c.0 PCI bridge [0604]: Intel Corporation Device [8086:a190] (rev f9)
\tBus: primary=00, secondary=02, subordinate=02, sec-latency=0
\t\tLnkCap:\tPort #1, Speed 8GT/s, Width x4, ASPM not supported
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x1 (downgraded)
02:00.0 Ethernet controller [0200]: Intel Corporation I210 [8086:1533] (rev 03)
\t\tLnkCap:\tPort #0, Speed 2.5GT/s, Width x1, ASPM L0s L1
\t\tLnkSta:\tSpeed 2.5GT/s (ok), Width x1 (ok)
00:14.0 USB controller [0c03]: Intel Corporation Device [8086:a1af] (rev 09)
00:11.5 System peripheral [0880]: Intel Corporation Device [8086:a1ec] (rev 09)
00:1d.0 PCI bridge [0604]: Intel Corporation Device [8086:a194] (rev f9)
\tBus: primary=00, secondary=03, subordinate=03, sec-latency=0
\t\tLnkCap:\tPort #5, Speed 8GT/s, Width x1, ASPM not supported
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x1 (ok)
03:00.0 VGA compatible controller [0300]: ASPEED Technology [1a03:2000] (rev 41)
"""
# The same with plain names, but for those that lspci lacks.
PLAIN = re.sub(r" ?\[\w{4}(:\w{4})?\]", "", DETAILS)
PLAIN = PLAIN.replace("System peripheral:", "System peripheral [0880]:")
GPU, SWITCH = "0000:19:00.0", "0000:17:00.0"


def test_details_give_the_tree_the_links_and_the_nodes():
    host = read(DETAILS)
    devices = {each.bus_id[5:]: each for each in host.devices}
    # Of each link the lower end: no ports of the switch, and no root ports.
    assert list(devices) == ["17:00.0", "19:00.0", "1a:00.0", "02:00.0"]
    switch, gpu, adapter, _ = devices.values()
    assert (switch.parent, gpu.parent, adapter.parent) == ("", SWITCH, SWITCH)
    assert [node.number for node in host.numa_nodes] == [0]
    # The switch could do more than the port above it.
    assert (switch.speed, switch.width) == ("16.0 GT/s PCIe", 16)
    assert (gpu.width, gpu.width_now, gpu.speed_now) == (16, 8, "16.0 GT/s PCIe")
    # ACS of a root port is not between the devices below the switch.
    assert [d.is_redirecting for d in devices.values()] == [True, False, False, False]
    off = read(
        DETAILS.replace("ReqRedir+ CmpltRedir+ UpstreamFwd+ E", "ReqRedir- C- E")
    )
    assert not any(device.is_redirecting for device in off.devices)
    # The bridge that has it on is named, and not the upper end of the switch.
    (found,) = (f for f in lint_host(host) if f.rule == "acs-redirects")
    assert "setpci -s 0000:18:00.0 ECAP_ACS+6.w=0000." in found.remedy
    changes = compare_hosts(off, host).differences
    assert {(c.fact, c.was, c.now) for c in changes} == {("ACS above", "off", "on")}
    short = read("\n".join(x for x in DETAILS.split("\n") if x[:1] != "\t"))
    assert "ACS above" not in {c.fact for c in compare_hosts(short, host).differences}


def found_in(text: str) -> dict[str, str]:
    return {finding.rule: finding.element for finding in lint_host(read(text))}


@pytest.mark.parametrize("details", [DETAILS, PLAIN], ids=["numbers", "names"])
def test_planted_faults_are_found_and_no_others(details):
    assert [gpu.sm for gpu in read(details).gpus] == [80]
    assert found_in(details) == {"trained-down": GPU, "acs-redirects": SWITCH}
    tree = draw_tree(Topology((read(details),)))
    assert "PCI 16.0 GT/s x8, 12 GB/s (both ends can do 16.0 GT/s x16)" in tree


def test_no_link_is_judged_by_one_of_its_ends():
    """A card may do more than its slot, and a list of it alone has no slot."""
    alone = DETAILS[DETAILS.index("19:00.0") : DETAILS.index("1a:00.0")]
    assert found_in(alone) == {}
    (gpu,) = read(alone).devices
    assert (gpu.speed, gpu.width) == ("16.0 GT/s PCIe", 8)


@pytest.mark.parametrize(
    "line",
    [
        "00:11.0 Unassigned class [ff00]: Intel Corporation C610 SPSR (rev 05)",
        "00:00.3 Generic system peripheral [0807]: Advanced Micro Devices 14a6",
        "0000:00:1f.0 0c05: 8086:a1a3 (rev 09)",
    ],
)
def test_classes_without_a_name_are_no_damage(line):
    text = f"{line}\n{PLAIN}"
    assert PROBE.recognises(Saved("it", text.encode()))
    assert read(text).devices == read(PLAIN).devices


def test_harm_does_none():
    assert check_harmless(read, bad_inputs(A100.read_bytes())) > 10


@pytest.mark.parametrize(
    ("title", "sm"),
    [
        ("NVIDIA H100 80GB HBM3", 90),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA GeForce RTX 3090", 86),
        ("NVIDIA A1000", UNKNOWN),
        ("Instinct MI300X", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_models_show_what_gpus_can(title, sm):
    assert compute_capability(title) == sm
